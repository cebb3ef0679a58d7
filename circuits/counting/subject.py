"""What a counting measurement is made on: the models of one seed, and a set of test examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.counting.boards import World
from circuits.counting.cards import load, model_folder, shipped_seeds, world_of
from circuits.counting.examples import Examples, load_examples, make_examples
from circuits.counting.questions import Asker
from interp.errors import InputError
from interp.model import generate
from interp.toy import ToyVLM

CHUNK = 256  # examples a forward; 60 MB of activations on 8x8 boards
MAX_NEW_TOKENS = 4  # two digits, the end, and one more that shows a longer answer

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done."""


def silent(what: str, share: float) -> None:
    """A `Progress` that says nothing."""


@dataclass(frozen=True)
class Setting:
    """Which models, and which examples they are asked about."""

    model: str = "tiny"
    """A preset, or a folder that `circuits counting train` wrote."""
    weights_seed: int | None = None
    """Which of the shipped models; the first if not given."""
    data_seed: int = 0
    """Seed of the test examples."""
    data: Path | None = None
    """Test records in the published format (JSONL) instead of fresh ones."""
    per_count: int = 40
    """Fresh test examples of every count."""
    device: str = "cpu"
    """Where the models run: cpu, cuda, cuda:1, ..."""


class Subject:
    """The two trained models of a seed, the same model untrained, and the test examples."""

    def __init__(
        self, number: ToyVLM, truth: ToyVLM, untrained: ToyVLM, world: World, examples: Examples
    ) -> None:
        self.number, self.truth, self.untrained = number, truth, untrained
        self.world, self.examples = world, examples
        self._answers: dict[tuple[str, bool], Int[np.ndarray, " example"]] = {}

    @classmethod
    def load(cls, setting: Setting) -> "Subject":
        """Load what a setting names.

        Raises:
            InputError: no such model or seed, files that are broken, a device that is not there, or
                records that are broken or of another world.
        """
        device = _device(setting.device)
        seed = weights_seed(setting)
        number, card = load(model_folder(setting.model, "number", seed), device=device)
        truth, _ = load(model_folder(setting.model, "truth", seed), device=device)
        untrained = ToyVLM(number.config, seed=seed).to(device)
        for model in (number, truth, untrained):
            model.raw.set_use_fused_attention(True)
        world = world_of(card)
        return cls(number, truth, untrained, world, _examples(setting, world))

    @cached_property
    def regimes(self) -> dict[str, Bool[np.ndarray, " example"]]:
        """The examples of each regime that has any."""
        return self.examples.regimes(self.world)

    @property
    def edges(self) -> dict[str, list[int]]:
        """First and last count of each regime that has examples."""
        world = self.world.regimes
        return {name: [world[name][0], world[name][-1]] for name in self.regimes}

    def items(self, modality: str) -> np.ndarray:
        """Boards or strings of the test examples."""
        return self.examples.boards if modality == "vision" else self.examples.strings

    def answers(
        self, modality: str, *, digits: bool = False, progress: Progress = silent
    ) -> Int[np.ndarray, " example"]:
        """The number the model names for every test example; -1 where it names none.

        With `digits`, only digits are allowed, so it always names one. Asked once, then kept.
        """
        if (modality, digits) not in self._answers:
            items, found = self.items(modality), []
            for part in chunks(len(items)):
                found.append(self.ask(modality, items[part], digits=digits))
                progress(f"{modality} answers", part.stop / len(items))
            self._answers[modality, digits] = np.concatenate(found)
        return self._answers[modality, digits]

    def ask(
        self, modality: str, items: np.ndarray, *, digits: bool = False, edits: tuple = ()
    ) -> Int[np.ndarray, " example"]:
        """The numbers that the model names for boards or strings, under edits."""
        asker, tokenizer = Asker(self.number), self.number.tokenizer
        answers = generate(
            self.number,
            asker.number(modality, items),
            max_new_tokens=2 if digits else MAX_NEW_TOKENS,
            edits=edits,
            allowed=tokenizer.digits if digits else None,
            stop=None if digits else tokenizer.eos,
        )
        return asker.read_number(answers)


def weights_seed(setting: Setting) -> int:
    """The seed of the models that a setting names."""
    if setting.weights_seed is not None:
        return setting.weights_seed
    seeds = shipped_seeds(setting.model) or [0]
    return seeds[0]


def chunks(n: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices that cover n examples in order."""
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))


def first_of_each_count(
    counts: Int[np.ndarray, " example"], n: int
) -> Bool[np.ndarray, " example"]:
    """True at the first `n` examples of every count."""
    chosen = np.zeros(len(counts), dtype=bool)
    for count in np.unique(counts):
        chosen[np.flatnonzero(counts == count)[:n]] = True
    return chosen


@torch.no_grad()
def encoder_output(
    model: ToyVLM, boards: np.ndarray, *, progress: Progress = silent
) -> Float[Tensor, "board patch d_vision"]:
    """The vision encoder's output on every patch, in order of cells."""
    asker, found = Asker(model), []
    for part in chunks(len(boards)):
        batch = asker.number("vision", boards[part])
        inputs = {k: v.to(model.device) for k, v in batch.inputs.items()}
        found.append(model.raw.vision(**inputs).cpu())
        progress("encoding boards", part.stop / len(boards))
    return torch.cat(found)


def _examples(setting: Setting, world: World) -> Examples:
    if setting.data is not None:
        try:
            return load_examples(setting.data, world)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot read the records in {setting.data}: {reason}") from None
    if setting.per_count < 1:
        raise InputError(f"per_count is {setting.per_count}; ask for at least 1 example a count")
    return make_examples(world, per_count=setting.per_count, seed=setting.data_seed)


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"device {name!r} cannot be used here ({reason}); use cpu") from None
    return name
