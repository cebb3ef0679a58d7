"""Which worlds, models and recipes have a name."""

from dataclasses import dataclass, field

from circuits.counting.boards import World
from circuits.counting.questions import vocabulary
from interp.errors import InputError
from interp.toy import StackConfig, ToyConfig

TASKS = ("number", "truth")
"""The model that answers with a number, and the one that answers True or False."""


@dataclass(frozen=True)
class Stage:
    """One stage of training: AdamW, linear warm-up, cosine down to `floor` of the rate."""

    steps: int
    lr: float
    warmup: int
    modalities: tuple[str, ...]
    """What the steps take in turn."""


@dataclass(frozen=True)
class Recipe:
    """How one model is trained: fresh examples at every step, loss on the answer alone."""

    stages: tuple[Stage, ...]
    batch: int = 64
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    floor: float = 0.02
    near: float = 0.0
    """True/False only: share of unequal pairs that are 1 to 5 apart; the rest is uniform."""


@dataclass(frozen=True)
class Preset:
    """A world, a model for it, how both models of a seed are trained, and the seeds shipped."""

    name: str
    world: World
    recipes: dict[str, Recipe]
    stack: StackConfig = StackConfig()
    seeds: tuple[int, ...] = (0, 1, 2)
    config: ToyConfig = field(init=False)

    def __post_init__(self) -> None:
        config = ToyConfig(vocabulary(), grid=self.world.size, decoder=self.stack, tower=self.stack)
        object.__setattr__(self, "config", config)


def _curriculum(first: int, second: int) -> tuple[Stage, Stage]:
    """Text alone, then pictures and text in turn (against forgetting)."""
    return (
        Stage(first, 3e-3, 100, ("text",)),
        Stage(second, 1e-3, 50, ("vision", "text")),
    )


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            World(),
            {
                "number": Recipe(_curriculum(1500, 1200)),
                "truth": Recipe(_curriculum(2500, 2500), near=0.5),
            },
        ),
    )
}


def preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
