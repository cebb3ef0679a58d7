"""Accuracy and attractors: shares from answers that are planted."""

import json

import numpy as np
import pytest

from circuits.counting import attractors, behaviour
from circuits.counting.boards import World
from circuits.counting.subject import Setting, Subject
from circuits.runs import Result


class Planted(Subject):
    """A subject whose answers are known."""

    def __init__(self, subject: Subject, planted: dict) -> None:
        super().__init__(
            subject.number, subject.truth, subject.untrained, subject.world, subject.examples
        )
        self._answers = planted


@pytest.fixture
def planted(small_subject) -> Planted:
    """Pictures: right in ID, always 3 beyond; free answers beyond are no number. Text: right."""
    counts = small_subject.examples.counts
    stuck = np.where(counts <= 3, counts, 3)
    free = np.where(counts <= 3, counts, -1)
    answers = {("vision", True): stuck, ("vision", False): free}
    return Planted(small_subject, answers | {("text", True): counts, ("text", False): counts})


def _again(result: Result) -> Result:
    return Result(json.loads(json.dumps(result.metrics)), json.loads(json.dumps(result.data)))


def test_accuracy_counts_what_was_planted(planted):
    metrics = behaviour.run(behaviour.Config(), planted).metrics
    assert metrics["accuracy.vision.id"] == metrics["accuracy.text.fe"] == 1.0
    assert metrics["accuracy.vision.ve"] == metrics["accuracy.vision.ve.digits"] == 0.0
    assert metrics["no_number.vision.ve"] == 1.0 and metrics["no_number.vision.id"] == 0.0
    assert metrics["accuracy.vision.ve.n"] == 9  # three counts, three examples each
    assert metrics["accuracy.vision.ve.high"] == pytest.approx(0.2991, abs=1e-4)  # Wilson, 0 of 9


def test_attractors_find_the_number_that_answers_fall_back_to(planted):
    metrics = attractors.run(attractors.Config(), planted).metrics
    assert metrics["attractor.vision.ve.answer_3"] == 1.0
    assert metrics["bias.vision.ve"] == pytest.approx(3 - np.mean([4, 5, 6]))
    assert metrics["tens.vision.ve"] == 1.0 and metrics["units.vision.ve"] == 0.0
    assert metrics["bias.text.fe"] == 0.0
    assert not [k for k in metrics if k.startswith("attractor.vision.ve.free")]


def test_the_places_that_answers_fall_back_to_are_told_apart():
    world = World(size=19, spread=30, vision_max=49, text_max=99, further=(100, 120))
    answers = np.array([49, 49, 9, 90, 99, 50, 65, 41])
    shares = {where: there.mean() for where, there in attractors.topology(answers, world).items()}
    assert shares == {
        "edge": 2 / 8, "last_decade": 2 / 8, "small": 1 / 8, "attractors": 5 / 8,
        "seen_decades": 4 / 8,
    }  # fmt: skip


def test_spread_is_measured_from_the_median_of_a_count_and_bias_from_the_truth(planted):
    answers, counts = np.array([1, 2, 6, 9, 9, 9]), np.array([2, 2, 2, 5, 5, 5])
    assert attractors.off_median(answers, counts).tolist() == [1, 0, 4, 0, 0, 0]
    metrics = attractors.run(attractors.Config(), planted).metrics
    assert metrics["spread.vision.ve"] == 0.0  # always the same wrong answer
    assert metrics["topology.vision.ve.edge"] == 1.0 and metrics["topology.text.ve.edge"] == 0.0
    assert metrics["topology.vision.ve.edge.low"] == pytest.approx(0.7009, abs=1e-4)  # Wilson


def test_places_of_answers_about_pictures_stand_beside_those_about_text_of_the_same_counts(planted):
    metrics = attractors.run(attractors.Config(), planted).metrics
    assert metrics["topology.excess.ve.edge"] == 1.0 and metrics["topology.excess.ve.edge.n"] == 9
    assert metrics["topology.excess.id.edge"] == metrics["topology.excess.ve.small"] == 0.0
    text = metrics["topology.text.ve.attractors"]
    assert metrics["topology.excess.ve.attractors"] == pytest.approx(1.0 - text)


def test_most_named_are_ordered_by_frequency_then_by_size():
    answers = np.array([7, 7, 3, 3, 9, -1, -1, -1])
    assert attractors.most_named(answers, 5) == [3, 7, 9]
    assert attractors.most_named(answers, 1) == [3]


@pytest.mark.parametrize("module", [behaviour, attractors])
def test_figures_and_tables_are_made_from_the_saved_data_alone(planted, module):
    result = _again(module.run(module.Config(), planted))
    figure, table = module.figure(result), module.table(result)
    assert len(figure.axes) >= 2
    assert len(table.rows) == 6


@pytest.mark.parametrize("module", [behaviour, attractors])
def test_regimes_without_examples_are_absent(planted, module):
    own = planted.examples.counts <= 3
    part = Planted(planted, {k: v[own] for k, v in planted._answers.items()})
    part.examples = planted.examples.select(own)
    result = module.run(module.Config(), part)
    assert not [k for k in result.metrics if ".ve" in k or ".fe" in k]
    assert len(module.table(result).rows) == 2
    module.figure(result)


def test_answers_are_asked_once_and_do_not_depend_on_the_chunk(small_subject, monkeypatch):
    from circuits.counting import subject as module

    free = small_subject.answers("vision")
    assert small_subject.answers("vision") is free
    monkeypatch.setattr(module, "CHUNK", 7 * 16)  # seven boards of 4x4
    assert [part.stop for part in module.chunks(small_subject.items("text"))][:3] == [7, 14, 21]
    other = Planted(small_subject, {})
    assert np.array_equal(other.answers("vision"), free)
    assert np.array_equal(
        other.answers("text", digits=True), small_subject.answers("text", digits=True)
    )
    assert small_subject.answers("text", digits=True).min() >= 0


def test_a_setting_of_no_examples_or_no_device_is_refused():
    from interp.errors import InputError

    with pytest.raises(InputError, match="per_count is 0"):
        Subject.load(Setting(per_count=0))
    with pytest.raises(InputError, match="device 'warp' cannot be used"):
        Subject.load(Setting(device="warp"))
