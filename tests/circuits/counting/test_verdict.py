"""The rules of the verdict, at each side of each limit."""

import pytest

from circuits.counting.verdict import STAGES, judge, verdict_metrics


def _interval(key: str, value: float, low: float, high: float) -> dict:
    return {key: value, f"{key}.low": low, f"{key}.high": high, f"{key}.n": 100}


def _metrics(**changed: tuple[float, float, float]) -> dict:
    """A model that sees, compares as well as in text, and names wrongly."""
    known = {
        "vision_gap.ve": (0.0, 0.0, 0.1),
        "vision_gap.untrained.ve": (0.1, 0.0, 0.2),
        "probe.trained.exact.ve": (1.0, 0.99, 1.0),
        "comparison.gap.ve": (0.01, -0.02, 0.04),
        "comparison.text.ve.near": (0.9, 0.85, 0.94),
        "language_gap.ve": (5.0, 4.0, 6.0),
        "accuracy.text.ve.digits": (0.99, 0.97, 1.0),
    }
    known |= {k.replace("__", "."): v for k, v in changed.items()}
    return {k: v for key, own in known.items() for k, v in _interval(key, *own).items()}


def _found(**changed: tuple[float, float, float]) -> tuple[str, ...]:
    return tuple(verdict.verdict for verdict in judge(_metrics(**changed)))


def test_seeing_and_comparing_intact_and_naming_wrong_supports_the_mapping():
    assert _found() == ("excluded", "excluded", "supported")


def test_naming_right_excludes_the_mapping():
    assert _found(language_gap__ve=(0.1, 0.0, 0.3))[2] == "excluded"


def test_an_interval_over_the_limit_is_undecided():
    assert _found(vision_gap__ve=(0.5, 0.3, 0.7)) == ("undecided", "excluded", "undecided")


def test_a_probe_that_is_exact_on_few_boards_decides_nothing():
    found = _found(vision_gap__ve=(0.0, 0.0, 0.0), probe__trained__exact__ve=(1.0, 0.51, 1.0))
    assert found == ("undecided", "excluded", "undecided")


def test_a_probe_that_fails_supports_individuation_and_leaves_the_mapping_open():
    assert _found(vision_gap__ve=(3.0, 2.0, 4.0)) == ("supported", "excluded", "undecided")


def test_pictures_compared_worse_than_text_support_magnitude_and_leave_the_mapping_open():
    assert _found(comparison__gap__ve=(0.3, 0.2, 0.4)) == ("excluded", "supported", "undecided")


def test_what_pictures_lose_beyond_seen_counts_decides_where_seen_counts_were_measured():
    lost = {"comparison__gap__ve": (0.02, -0.1, 0.1), "comparison__gap__id": (-0.2, -0.3, -0.1)}
    found = _metrics(**lost, comparison__gap__ve__beyond_id=(0.22, 0.1, 0.3))
    verdict = judge(found)[1]
    assert verdict.verdict == "supported"
    assert verdict.decided_by == "comparison.gap.ve.beyond_id"
    assert "-20.0 [-30.0, -10.0] points in ID" in verdict.controls


def test_a_text_control_at_chance_decides_nothing_on_magnitude():
    assert _found(comparison__text__ve__near=(0.55, 0.5, 0.6))[1] == "undecided"


def test_words_that_text_does_not_know_either_decide_nothing_on_mapping():
    assert _found(accuracy__text__ve__digits=(0.5, 0.4, 0.6))[2] == "undecided"


def test_without_examples_in_ve_everything_is_undecided():
    assert [v.verdict for v in judge({})] == ["undecided"] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_metrics_carry_the_interval_that_decides(stage):
    metrics = _metrics()
    found = verdict_metrics(metrics)
    decided_by = found[f"verdict.{stage}.decided_by"]
    for part in ("low", "high", "n"):
        assert found[f"verdict.{stage}.{part}"] == metrics[f"{decided_by}.{part}"]


def test_the_control_of_individuation_says_when_an_untrained_encoder_does_as_well():
    assert "no achievement" in judge(_metrics())[0].controls
    told = judge(_metrics(vision_gap__untrained__ve=(3.0, 2.0, 4.0)))[0].controls
    assert told == "an untrained encoder is off by 3.00 [2.00, 4.00] stones"
