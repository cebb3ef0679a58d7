"""A trained model's folder: its weights, and a card that says how they came about and score."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from circuits.counting.boards import World
from circuits.counting.presets import PRESETS, TASKS
from interp.errors import InputError
from interp.toy import ToyVLM
from interp.toy.weights import load as load_weights

SHIPPED = Path(__file__).parent / "weights"
WEIGHTS, CARD = "model.safetensors", "card.json"
_KEYS = ("preset", "task", "seed", "command", "world", "recipe", "curve", "scores", "sha256")


def model_folder(model: str, task: str, seed: int) -> Path:
    """Where the models of a preset lie, or of a folder that `counting train` wrote.

    Raises:
        InputError: neither a preset nor such a folder, or a seed that is not there.
    """
    if task not in TASKS:
        raise InputError(f"no task {task!r}; there are {' and '.join(TASKS)}")
    if Path(model).is_dir() and model not in PRESETS:
        return _trained_folder(Path(model), task, seed)
    if model not in PRESETS:
        raise InputError(
            f"no preset and no folder {model!r}; presets are {', '.join(PRESETS)},"
            " a folder is one that `circuits counting train` wrote"
        )
    folder = SHIPPED / model / f"seed_{seed}" / task
    if not folder.is_dir():
        ships = ", ".join(map(str, shipped_seeds(model))) or "none"
        raise InputError(
            f"{model} ships no seed {seed}; it ships {ships} (train it: python -m circuits counting"
            f" train --model {model} --seed {seed} --out DIR, then name DIR as the model)"
        )
    return folder


def shipped_seeds(model: str) -> list[int]:
    """The seeds of a preset of which both models ship; of a trained folder, its one seed."""
    if model in PRESETS:
        both = [f for f in (SHIPPED / model).glob("seed_*") if all((f / t).is_dir() for t in TASKS)]
        return sorted(int(folder.name.removeprefix("seed_")) for folder in both)
    return [read_card(model_folder(model, TASKS[0], -1))["seed"]]


def load(folder: Path, *, device: str = "cpu") -> tuple[ToyVLM, dict]:
    """The model and its card, once they are seen to belong together.

    Raises:
        InputError: a file that is missing, broken or cut short, or a card of other weights.
    """
    card = read_card(folder)
    if card["task"] != folder.name:
        raise InputError(
            f"{folder / CARD} is that of a {card['task']} model; get the {folder.name} model again"
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise InputError(f"{path} is missing; the card beside it stands alone, get both again")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != card["sha256"]:
        raise InputError(
            f"{path} does not match its card: sha256 {found[:12]}..., the card says"
            f" {str(card['sha256'])[:12]}...; get both again"
        )
    model = load_weights(path, device=device)
    if model.config.grid != card["world"]["size"]:
        raise InputError(
            f"{folder / CARD} says boards of {card['world']['size']}, the weights are for"
            f" {model.config.grid}; get both again"
        )
    return model, card


def world_of(card: dict) -> World:
    """The world that a card's model was trained in."""
    return World(**{**card["world"], "further": tuple(card["world"]["further"])})


def read_card(folder: Path) -> dict:
    """A card; InputError where it is missing, broken or lacks something."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text())
        lacking = [key for key in _KEYS if key not in card]
        world_of(card)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); get it again") from None
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is no card ({error}); get it again") from None
    if lacking:
        raise InputError(f"{path} lacks {', '.join(lacking)}; get it again")
    return card


def make_card(content: bytes, **facts: object) -> dict:
    """A card for these weights; `facts` are everything but their checksum."""
    card = {**facts, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    missing = [key for key in _KEYS if key not in card]
    if missing:
        raise InputError(f"a card needs {', '.join(missing)}")
    return card


def as_json(value: object) -> dict:
    """A frozen dataclass as JSON keeps it."""
    return json.loads(json.dumps(asdict(value)))


def _trained_folder(root: Path, task: str, seed: int) -> Path:
    folder = root / task
    if not (folder / CARD).is_file():
        raise InputError(
            f"{root} holds no {task} model (no {task}/{CARD}): name a folder that"
            " `circuits counting train` wrote"
        )
    own = read_card(folder)["seed"]
    if seed not in (-1, own):
        raise InputError(f"{root} holds seed {own}, not {seed}: leave --weights-seed out")
    return folder
