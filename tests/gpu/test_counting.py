"""The counting study on a GPU: `make test PYTEST_ARGS=tests/gpu`. Left out where there is none."""

from dataclasses import replace

import pytest
import torch

from circuits.counting import behaviour, comparison, training
from circuits.counting.presets import preset
from circuits.counting.subject import Setting, Subject

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def learner() -> training.Learner:
    """The published recipe at its batch size, on a set of 32 examples a count, 4 steps a stage."""
    original = preset("paper-original")
    first, second = original.recipes["number"].stages
    recipe = replace(
        original.recipes["number"],
        per_count=32,
        stages=(replace(first, steps=4), replace(second, steps=4)),
    )
    return training.Learner(
        replace(original, recipes={"number": recipe}), "number", 0, device="cuda"
    )


def test_the_published_recipe_trains_at_its_batch_size(learner, tmp_path):
    before = {k: v.clone() for k, v in learner.model.raw.state_dict().items()}
    while not learner.done:
        learner.advance()
        (tmp_path / "kept").write_bytes(learner.to_bytes())
    after = learner.model.raw.state_dict()
    assert all(v.device.type == "cuda" for v in after.values())
    assert all(v.isfinite().all() for v in after.values())
    assert not all(torch.equal(before[k], after[k]) for k in before)
    assert learner.restore(tmp_path / "kept")


@pytest.mark.parametrize("module", [behaviour, comparison])
def test_measurements_agree_with_those_of_the_cpu(module):
    found = {}
    for device in ("cpu", "cuda"):
        subject = Subject.load(Setting("tiny", per_count=4, device=device))
        found[device] = module.run(module.Config(), subject).metrics
    assert found["cpu"].keys() == found["cuda"].keys()
    for key, value in found["cpu"].items():
        assert found["cuda"][key] == pytest.approx(value, abs=0.03), key
