"""The questions of the counting study, asked about boards and strings, and the answers to them.

Wording and word-level tokens with one token a digit are the paper's (arXiv:2605.30170, section 3).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from circuits.counting.boards import LETTERS, C, cell_patches, render
from interp.errors import InputError
from interp.model import Batch, Picture, Prompt, Text
from interp.toy import ToyVLM
from interp.toy.config import EOS, SPECIAL
from interp.toy.prompts import normalised

QUESTIONS = {
    ("number", "vision"): "How many black stones are there on the chessboard ?",
    ("number", "text"): "How many c letters are there in the given string ?",
    ("truth", "vision"): "Is the number of c letters in the given string the same as the number of"
    " black stones on the chessboard ?",
    ("truth", "text"): "Are the number of c letters in both input strings the same ?",
}
"""By task and modality; the published wording."""

START, END = "<string_start>", "<string_end>"
TRUTH = ("False", "True")
MODALITIES = ("vision", "text")


def vocabulary() -> tuple[str, ...]:
    """Every word that a question or an answer uses, specials first."""
    words = [*SPECIAL, START, END, *"0123456789", *LETTERS, *TRUTH]
    for question in QUESTIONS.values():
        words += [word for word in question.split() if word not in words]
    return tuple(dict.fromkeys(words))


class Asker:
    """Questions as batches of one model; boards are looked up, which equals rendering them.

    A board is int8 (row column), a string int8 (pos), as `circuits.counting.boards` draws them.
    """

    def __init__(self, model: ToyVLM) -> None:
        self.model = model
        self._frames: dict[tuple[str, str], Batch] = {}

    def number(self, modality: str, items: Int8[np.ndarray, "example *cells"]) -> Batch:
        """How many: of boards (vision) or of strings (text)."""
        return self._ask("number", modality, items)

    def truth(
        self,
        modality: str,
        items: Int8[np.ndarray, "example *cells"],
        strings: Int8[np.ndarray, "example pos"],
    ) -> Batch:
        """Is the number in `strings` the one of `items`: boards (vision) or strings (text)?"""
        return self._ask("truth", modality, items, strings)

    def prompt(
        self,
        task: str,
        modality: str,
        item: Int8[np.ndarray, "*cells"],
        string: Int8[np.ndarray, " pos"] | None = None,
    ) -> Prompt:
        """The same as a prompt, with the board as a picture: spans `item` and `string`."""
        segments: list = []
        if modality == "vision":
            segments.append(Picture(render(item, cell=self.model.config.patch), "item"))
        else:
            segments += [START, Text(letters(item), "item"), END]
        if task == "truth":
            if string is None:
                raise InputError("a True/False question needs the string to compare with")
            segments += [START, Text(letters(string), "string"), END]
        return Prompt(*segments, QUESTIONS[task, modality])

    def _ask(
        self, task: str, modality: str, items: np.ndarray, strings: np.ndarray | None = None
    ) -> Batch:
        if modality not in MODALITIES:
            raise InputError(f"no modality {modality!r}; there are {' and '.join(MODALITIES)}")
        frame = self._frame(task, modality, items, strings)
        tokens, inputs = frame.tokens.repeat(len(items), 1), {}
        spans = frame.layout.spans[0]
        if modality == "vision":
            inputs = {"kinds": self._kinds, "patches": _long(items.reshape(len(items), -1))}
        else:
            tokens[:, slice(*spans["item"])] = self._letter_ids[_long(items)]
        if strings is not None:
            tokens[:, slice(*spans["string"])] = self._letter_ids[_long(strings)]
        return replace(frame.repeat(len(items)), tokens=tokens, inputs=inputs)

    def _frame(
        self, task: str, modality: str, items: np.ndarray, strings: np.ndarray | None
    ) -> Batch:
        sizes = [items[0].shape, None if strings is None else strings[0].shape]
        key = (task, modality, *sizes)
        if key not in self._frames:
            string = None if strings is None else strings[0]
            self._frames[key] = self.model.encode([self.prompt(task, modality, items[0], string)])
        return self._frames[key]

    @cached_property
    def _kinds(self) -> Float[Tensor, "kind pixel"]:
        """The three kinds of cell as the tower reads a patch."""
        planes = torch.from_numpy(cell_patches(self.model.config.patch).copy()).permute(0, 3, 1, 2)
        return normalised(planes.flatten(1))

    @cached_property
    def _letter_ids(self) -> Int[Tensor, " letter"]:
        return torch.tensor([self.model.tokenizer.id(letter) for letter in LETTERS])

    # --- answers ------------------------------------------------------------------------------

    def number_answer(self, counts: Int[np.ndarray, " example"]) -> Int[Tensor, "example answer"]:
        """At least two digits, then the end: 7 is `0 7 <eos>`, 100 is `1 0 0 <eos>`.

        Raises:
            InputError: a count below 0 or above 999, or counts of two and of three digits at once.
        """
        counts = np.asarray(counts)
        if counts.size and not 0 <= counts.min() <= counts.max() <= 999:
            worst = counts.min() if counts.min() < 0 else counts.max()
            raise InputError(f"count {worst} has no answer; counts go from 0 to 999")
        if counts.size and counts.min() < 100 <= counts.max():
            raise InputError(
                f"counts {counts.min()} and {counts.max()} have answers of two and of three digits;"
                " ask about them apart"
            )
        places = (100, 10, 1) if counts.size and counts.max() >= 100 else (10, 1)
        digits = torch.tensor(self.model.tokenizer.digits)
        tokens = [digits[_long(counts // place % 10)] for place in places]
        return torch.stack([*tokens, torch.full_like(tokens[0], self._eos)], 1)

    def truth_answer(self, same: np.ndarray) -> Int[Tensor, "example 2"]:
        """True or False, then the end."""
        ids = torch.tensor([self.model.tokenizer.id(word) for word in TRUTH])[_long(same)]
        return torch.stack([ids, torch.full_like(ids, self._eos)], 1)

    def read_number(self, answers: Int[Tensor, "example new"]) -> Int[np.ndarray, " example"]:
        """The number that an answer names; -1 where it is no number.

        A number is two digits, or three of which the first is not 0, and then the end or nothing
        more.
        """
        value = {token: i for i, token in enumerate(self.model.tokenizer.digits)}
        numbers = np.full(len(answers), -1, dtype=np.int64)
        for i, row in enumerate(answers.tolist()):
            named = row[: row.index(self._eos)] if self._eos in row else row
            digits = [value[token] for token in named if token in value]
            if len(digits) == len(named) and (len(named) == 2 or (len(named) == 3 and digits[0])):
                numbers[i] = int("".join(map(str, digits)))
        return numbers

    @property
    def _eos(self) -> int:
        return self.model.tokenizer.id(EOS)


def letters(string: Int8[np.ndarray, " pos"]) -> str:
    """Ids to letters: `[0, 2, 1]` is "acb"."""
    return "".join(LETTERS[i] for i in string)


def number_of_c(strings: Int8[np.ndarray, "example pos"]) -> Int[np.ndarray, " example"]:
    return (strings == C).sum(1)


def _long(values: np.ndarray | Sequence[int]) -> Int[Tensor, "..."]:
    return torch.as_tensor(np.asarray(values), dtype=torch.long)
