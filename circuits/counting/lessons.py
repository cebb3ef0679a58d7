"""What is a model trained on? Questions about counts that its modality is shown, and their answers.

Fresh at every step, or a set drawn once and visited in epochs, as the paper did
(arXiv:2605.30170, section 3). Either way a batch is a function of seed, stage and step alone.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int8
from torch import Tensor

from circuits.counting.boards import MAX_CELLS, World, draw_boards, draw_strings, generator
from circuits.counting.questions import MODALITIES, Asker, number_of_c
from interp.model import Batch

_ITEMS, _STRINGS, _DRAWS, _OTHERS, _ORDER = 1, 2, 3, 4, 5  # streams of one step's seed
_SET = 300  # in place of a stage, in the seed of a set that is drawn once


class Lesson(NamedTuple):
    """A batch of questions and the tokens of their right answers."""

    batch: Batch
    answers: Int[Tensor, "example answer"]


class Lessons:
    """The examples of one model: a function of stage and step, never seen twice."""

    def __init__(self, asker: Asker, world: World, task: str, seed: int, near: float) -> None:
        self.asker, self.world, self.task, self.seed, self.near = asker, world, task, seed, near

    def draw(self, modality: str, place: tuple[int, int], n: int) -> Lesson:
        """`n` examples of counts that the modality is shown in training."""
        rng = generator((self.seed, *place), stream=_DRAWS)
        return self.of(modality, rng.integers(0, self.top(modality) + 1, n), place)

    def top(self, modality: str) -> int:
        """The largest count that the modality is shown in training."""
        return self.world.vision_max if modality == "vision" else self.world.text_max

    def of(
        self,
        modality: str,
        counts: Int[np.ndarray, " example"],
        place: tuple[int, int],
        *,
        split: str = "train",
    ) -> Lesson:
        """Examples of the given counts."""
        return self.ask(modality, counts, *self.items(modality, counts, place, split=split))

    def ask(
        self,
        modality: str,
        counts: Int[np.ndarray, " example"],
        items: Int8[np.ndarray, "example *cells"],
        strings: Int8[np.ndarray, "example pos"] | None,
    ) -> Lesson:
        """Boards or strings with their counts as questions; `strings` are what to compare with."""
        if strings is None:
            return Lesson(self.asker.number(modality, items), self.asker.number_answer(counts))
        answers = self.asker.truth_answer(number_of_c(strings) == counts)
        return Lesson(self.asker.truth(modality, items, strings), answers)

    def items(
        self,
        modality: str,
        counts: Int[np.ndarray, " example"],
        place: tuple[int, int],
        *,
        split: str = "train",
    ) -> tuple[Int8[np.ndarray, "example *cells"], Int8[np.ndarray, "example pos"] | None]:
        """Boards or strings of these counts, and for True/False the strings to compare with."""
        items = self._items(modality, counts, (self.seed, *place, _ITEMS), split)
        if self.task == "number":
            return items, None
        others = self._others(counts, generator((self.seed, *place), stream=_OTHERS))
        return items, self._items("text", others, (self.seed, *place, _STRINGS), split)

    def _items(
        self, modality: str, counts: np.ndarray, seed: tuple[int, ...], split: str
    ) -> np.ndarray:
        size = self.world.size
        if modality == "vision":
            spread = self.world.spread
            return draw_boards(counts, size=size, spread=spread, seed=seed, split=split)
        return draw_strings(counts, length=size**2, seed=seed, split=split)

    def _others(self, counts: np.ndarray, rng: np.random.Generator) -> Int[np.ndarray, " example"]:
        """Half the same number, half another: uniform, or (a share `near`) 1 to 5 away.

        Never all letters: that string exists once, so one of the splits lacks it.
        """
        n, most = len(counts), self.world.size**2 - 1
        far = (counts + rng.integers(1, most + 1, n)) % (most + 1)
        step = rng.integers(1, min(5, most) + 1, n) * rng.choice([-1, 1], n)
        close = np.where((counts + step < 0) | (counts + step > most), counts - step, counts + step)
        other = np.where(rng.random(n) < self.near, close, far)
        return np.where(rng.random(n) < 0.5, counts, other)


class Epochs:
    """A set with as many examples of every count, drawn once; each epoch takes all in a new order.

    In memory, a byte a cell: the published set of 19x19 takes 0.5 GB, 0.9 GB for True/False.
    """

    def __init__(self, lessons: Lessons, per_count: int) -> None:
        self.lessons, self.per_count = lessons, per_count
        self._set, self._order = cache(self._drawn), lru_cache(4)(self._shuffled)

    def draw(self, modality: str, stage: int, start: int, n: int) -> Lesson:
        """Examples number `start` to `start + n` of all that the stage takes."""
        counts, items, strings = self._set(modality)
        epoch, within = np.divmod(np.arange(start, start + n), len(counts))
        orders = {int(e): self._order(modality, stage, int(e)) for e in np.unique(epoch)}
        chosen = np.array([orders[e][i] for e, i in zip(epoch, within, strict=True)])
        compared = None if strings is None else strings[chosen]
        return self.lessons.ask(modality, counts[chosen], items[chosen], compared)

    def _drawn(self, modality: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Counts, items and strings to compare with; drawn in parts that one call may ask for."""
        counts = np.repeat(np.arange(self.lessons.top(modality) + 1), self.per_count)
        seed, size = _SET + MODALITIES.index(modality), MAX_CELLS // self.lessons.world.size**2
        items = strings = None
        for i, start in enumerate(range(0, len(counts), size)):
            part = slice(start, start + size)
            own, compared = self.lessons.items(modality, counts[part], (seed, i))
            if items is None:  # filled part by part: joining them would hold everything twice
                items = np.empty((len(counts), *own.shape[1:]), own.dtype)
                if compared is not None:
                    strings = np.empty((len(counts), compared.shape[1]), compared.dtype)
            items[part] = own
            if strings is not None:
                strings[part] = compared
        return counts, items, strings

    def _shuffled(self, modality: str, stage: int, epoch: int) -> Int[np.ndarray, " example"]:
        seed = (self.lessons.seed, MODALITIES.index(modality), stage, epoch)
        return generator(seed, stream=_ORDER).permutation(len(self._set(modality)[0]))
