"""A small world, and models of random weights in it: seconds, not minutes."""

import pytest

from circuits.counting.boards import World
from circuits.counting.examples import make_examples
from circuits.counting.questions import vocabulary
from circuits.counting.subject import Subject
from interp.toy import StackConfig, ToyConfig, ToyVLM

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
