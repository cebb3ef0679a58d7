"""Models that ship with the project, and models of a folder, by name."""

from pathlib import Path

from circuits.counting.cards import load as load_folder
from circuits.counting.cards import model_folder, shipped_seeds
from interp.model import HookedVLM


def load(
    name: str | Path, *, task: str = "number", seed: int | None = None, device: str = "cpu"
) -> HookedVLM:
    """A model, ready to run: `load("tiny")`.

    Args:
        name: a preset ("tiny"), or a folder that `circuits counting train` wrote.
        task: "number" answers with a number, "truth" with True or False.
        seed: which of its trained models; the first if not given.

    Raises:
        InputError: no such model, task or seed, or files that are broken.
    """
    if seed is None:
        seed = (shipped_seeds(str(name)) or [0])[0]
    return load_folder(model_folder(str(name), task, seed), device=device)[0]
