"""What a counting measurement is made on: the models of one seed, and a set of test examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from circuits.counting.boards import World
from circuits.counting.cards import load, model_folder, shipped_seeds, world_of
from circuits.counting.examples import Examples, load_examples, make_examples
from circuits.counting.questions import Asker
from interp.errors import InputError
from interp.model import Batch, State, generate
from interp.toy import ToyVLM

CHUNK = 16384  # cells a forward: 256 boards of 8x8, 45 of 19x19; 60 MB of activations
MAX_NEW_TOKENS = 4  # up to three digits and the end; a fourth digit shows a longer answer

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
        device = device_named(setting.device)
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
            for part in chunks(items):
                found.append(self._both(modality, items[part]))
                progress(f"{modality} answers", part.stop / len(items))
            free, held = map(np.concatenate, zip(*found, strict=True))
            self._answers |= {(modality, False): free, (modality, True): held}
        return self._answers[modality, digits]

    def _both(self, modality: str, items: np.ndarray) -> list[Int[np.ndarray, " example"]]:
        """Free answers and those held to digits; the question is read once."""
        state = self.number.prefill(Asker(self.number).number(modality, items))
        return [self._number(state, digits) for digits in (False, True)]

    def ask(
        self, modality: str, items: np.ndarray, *, digits: bool = False, edits: tuple = ()
    ) -> Int[np.ndarray, " example"]:
        """The numbers that the model names for boards or strings, under edits."""
        return self._number(Asker(self.number).number(modality, items), digits, edits)

    def _number(
        self, asked: Batch | State, digits: bool, edits: tuple = ()
    ) -> Int[np.ndarray, " example"]:
        tokenizer = self.number.tokenizer
        answers = generate(
            self.number,
            asked,
            max_new_tokens=2 if digits else MAX_NEW_TOKENS,
            edits=edits,
            allowed=tokenizer.digits if digits else None,
            stop=None if digits else tokenizer.eos,
        )
        return Asker(self.number).read_number(answers)


def weights_seed(setting: Setting) -> int:
    """The seed of the models that a setting names."""
    if setting.weights_seed is not None:
        return setting.weights_seed
    seeds = shipped_seeds(setting.model) or [0]
    return seeds[0]


def chunks(items: Shaped[np.ndarray, "example *cells"]) -> Iterator[slice]:
    """Slices that cover boards or strings in order, as many at once as one forward takes."""
    size = max(1, CHUNK // max(1, int(np.prod(items.shape[1:]))))
    for start in range(0, len(items), size):
        yield slice(start, min(len(items), start + size))


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
    model: ToyVLM, boards: Shaped[np.ndarray, "board row column"]
) -> Float[Tensor, "board patch d_vision"]:
    """The vision encoder's output on every patch, in order of cells."""
    asker, found = Asker(model), []
    for part in chunks(boards):
        batch = asker.number("vision", boards[part])
        inputs = {k: v.to(model.device) for k, v in batch.inputs.items()}
        found.append(model.raw.vision(**inputs).cpu())
    return torch.cat(found)


def _examples(setting: Setting, world: World) -> Examples:
    if setting.data is not None:
        if setting.per_count != Setting.per_count:
            raise InputError(
                f"per_count {setting.per_count} is for fresh examples, and of the records in"
                f" {setting.data} all are taken: leave one of them out"
            )
        try:
            return load_examples(setting.data, world)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot read the records in {setting.data}: {reason}") from None
    if setting.per_count < 1:
        raise InputError(f"per_count is {setting.per_count}; ask for at least 1 example a count")
    return make_examples(world, per_count=setting.per_count, seed=setting.data_seed)


def device_named(name: str) -> str:
    """The name again, once something can be put there.

    Raises:
        InputError: there is no such device.
    """
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"device {name!r} cannot be used here ({reason}); use cpu") from None
    return name
