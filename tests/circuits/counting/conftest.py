"""A small world, and models of random weights in it: seconds, not minutes."""

import json
from pathlib import Path

import pytest

from circuits.counting import cards
from circuits.counting.boards import World
from circuits.counting.examples import make_examples
from circuits.counting.questions import vocabulary
from circuits.counting.subject import Subject
from interp.toy import StackConfig, ToyConfig, ToyVLM, weights

SMALL = World(size=4, spread=2, vision_max=3, text_max=6, further=(8, 10))


@pytest.fixture(scope="session")
def small_world() -> World:
    return SMALL


def small_model(seed: int) -> ToyVLM:
    stack = StackConfig(n_layers=2, n_heads=2, d_model=16, d_head=8, d_mlp=32)
    return ToyVLM(ToyConfig(vocabulary(), grid=4, decoder=stack, tower=stack), seed=seed)


@pytest.fixture(scope="session")
def small_subject() -> Subject:
    """Untrained models as number, truth and control; three examples a count."""
    examples = make_examples(SMALL, per_count=3, seed=5)
    return Subject(small_model(0), small_model(1), small_model(2), SMALL, examples)


@pytest.fixture
def model_folder(tmp_path, small_subject) -> Path:
    """A folder as `counting train` leaves it, with the untrained models of `small_subject`."""
    return _written(small_subject, tmp_path / "model")


@pytest.fixture(scope="session")
def write_models():
    """Writes the models of a subject to a new folder, as `counting train` does."""
    return _written


def _written(subject: Subject, folder: Path) -> Path:
    for task, model in (("number", subject.number), ("truth", subject.truth)):
        content = weights.to_bytes(model)
        card = cards.make_card(
            content, preset="small", task=task, seed=4, command="train", recipe={}, curve=[],
            scores={}, world=cards.as_json(subject.world),
        )  # fmt: skip
        (folder / task).mkdir(parents=True)
        (folder / task / cards.WEIGHTS).write_bytes(content)
        (folder / task / cards.CARD).write_text(json.dumps(card))
    return folder
