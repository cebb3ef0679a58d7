"""Words to token ids: split at spaces, numbers into digits, strings of letters into letters."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from interp.errors import InputError
from interp.toy.config import EOS, PAD


class WordTokenizer:
    """A closed vocabulary, one token a word.

    >>> from interp.toy.config import SPECIAL
    >>> tokenizer = WordTokenizer((*SPECIAL, "0", "7", "a", "b", "How", "many"))
    >>> tokenizer("How many abba 07")
    [10, 11, 8, 9, 9, 8, 6, 7]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self.ids = {word: i for i, word in enumerate(words)}
        self.pad, self.eos = self.ids[PAD], self.ids[EOS]
        self.digits = [self.ids[d] for d in "0123456789" if d in self.ids]

    def id(self, word: str) -> int:
        """The token of one word.

        Raises:
            InputError: it is not in the vocabulary.
        """
        if word not in self.ids:
            raise InputError(
                f"no word {word!r} in the vocabulary of {len(self.words)}: {self._plain()}"
            )
        return self.ids[word]

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            InputError: a word that is neither in the vocabulary nor made of its single characters.
        """
        ids: list[int] = []
        for word in text.split():
            if word in self.ids:
                ids.append(self.ids[word])
            elif all(c in self.ids for c in word):
                ids.extend(self.ids[c] for c in word)
            else:
                raise InputError(
                    f"no word {word!r} in the vocabulary of {len(self.words)}: {self._plain()}"
                )
        return ids

    def decode(self, tokens: Int[Tensor, " pos"] | Sequence[int]) -> str:
        """Words with spaces between them; pads are left out."""
        return " ".join(self.words[int(t)] for t in tokens if int(t) != self.pad)

    def _plain(self) -> str:
        return " ".join(w for w in self.words if not w.startswith("<"))
