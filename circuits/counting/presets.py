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
    """One stage of training: AdamW, linear warm-up, then down to `Recipe.floor` of the rate."""

    steps: int
    lr: float
    warmup: int
    modalities: tuple[str, ...]
    """What is trained on, in turn."""
    turn: int = 1
    """Steps in a row on one modality."""
    decoder_lr: float | None = None
    """Rate of the decoder and the projector; None: as everything else."""


@dataclass(frozen=True)
class Recipe:
    """How one model is trained: fresh examples at every step, loss on the answer alone."""

    stages: tuple[Stage, ...]
    batch: int = 64
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float | None = 1.0
    """Largest norm of the gradient."""
    decay: str = "cosine"
    """How the rate falls: cosine or linear."""
    floor: float = 0.02
    near: float = 0.0
    """True/False only: share of unequal pairs that are 1 to 5 apart; the rest is uniform."""
    per_count: int | None = None
    """Examples of every count, drawn once and visited in epochs; None: fresh at every step."""


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


def _curriculum(first: int, second: int, *, lr: float = 3e-3) -> tuple[Stage, Stage]:
    """Text alone, then pictures and text in turn (against forgetting)."""
    return (
        Stage(first, lr, 100, ("text",)),
        Stage(second, 1e-3, 50, ("vision", "text")),
    )


def _published(world: World) -> Recipe:
    """8192 examples a count, batch 1024, 20 epochs a stage (arXiv:2605.30170, section 3).

    In stage 2 blocks of 2048 pictures and 2048 texts take turns until the pictures have been
    seen 20 times. What the paper leaves open is as PyTorch has it.
    """
    epochs, per_count, batch = 20, 8192, 1024
    texts = epochs * per_count * (world.text_max + 1) // batch
    pictures = epochs * per_count * (world.vision_max + 1) // batch
    return Recipe(
        (
            Stage(texts, 2e-3, 50, ("text",)),
            Stage(2 * pictures, 1e-3, 50, ("vision", "text"), turn=2, decoder_lr=1e-5),
        ),
        batch=batch,
        betas=(0.9, 0.999),
        clip=None,
        decay="linear",
        floor=0.0,
        per_count=per_count,
    )


GO = World(size=19, spread=30, vision_max=49, text_max=99, further=(100, 120))
"""The boards of the paper's own toy model (arXiv:2605.30170, section 3)."""

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
        Preset(
            "heads",
            World(),
            {
                "number": Recipe(_curriculum(800, 800, lr=1e-3)),
                "truth": Recipe(_curriculum(1200, 1200, lr=1e-3), near=0.5),
            },
            StackConfig(n_layers=4, n_heads=8, d_model=64, d_head=8, d_mlp=256),
        ),
        Preset(
            "paper",
            GO,
            {
                "number": Recipe(_curriculum(3400, 4800, lr=2e-3), batch=32),
                "truth": Recipe(_curriculum(6000, 6000, lr=2e-3), batch=32, near=0.5),
            },
            seeds=(0, 1),
        ),
        Preset("paper-original", GO, {task: _published(GO) for task in TASKS}, seeds=()),
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
