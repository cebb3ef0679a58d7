"""At which stage does visual counting break? The same rules for every model.

The paper's three stages (arXiv:2605.30170, section 1): telling the stones apart (individuation),
carrying their amount (magnitude), naming it (mapping). As the place of the break, a stage is
*excluded* where an interval shows it intact in visual extrapolation (VE), *supported* where one
shows it broken, else *undecided*.
"""

from collections.abc import Mapping
from typing import NamedTuple

STAGES = ("individuation", "magnitude", "mapping")
HALF = 0.5
"""Stones: a mean error below this rounds to the right number."""
MARGIN = 0.05
"""Share of comparisons that pictures may lose beyond text and still count as no worse."""
KNOWS = 0.9
"""Share of right answers from which a control counts as able to do the task at all."""
ABOVE_CHANCE = 0.6
"""The same for a True/False task, whose chance is 0.5."""

Metrics = Mapping[str, float | int | str]


class Verdict(NamedTuple):
    """A stage's verdict, the measurement whose interval decides, and what its controls say."""

    stage: str
    verdict: str
    decided_by: str
    reason: str
    controls: str


def judge(metrics: Metrics) -> list[Verdict]:
    """The verdict on every stage; undecided where its measurement has no examples."""
    individuation = _individuation(metrics)
    magnitude = _magnitude(metrics)
    mapping = _mapping(metrics, individuation.verdict, magnitude.verdict)
    return [individuation, magnitude, mapping]


def verdict_metrics(metrics: Metrics) -> dict[str, float | int | str]:
    """`verdict.{stage}` and the interval that decides it, as flat metrics."""
    found: dict[str, float | int | str] = {}
    for verdict in judge(metrics):
        key = f"verdict.{verdict.stage}"
        found |= {
            key: verdict.verdict,
            f"{key}.decided_by": verdict.decided_by,
            f"{key}.reason": verdict.reason,
            f"{key}.controls": verdict.controls,
        }
        for part in ("low", "high", "n"):
            if f"{verdict.decided_by}.{part}" in metrics:
                found[f"{key}.{part}"] = metrics[f"{verdict.decided_by}.{part}"]
    return found


def _individuation(metrics: Metrics) -> Verdict:
    key = "vision_gap.ve"
    if key not in metrics:
        return _missing("individuation", key)
    verdict, exact = _side(metrics, key, HALF), "probe.trained.exact.ve"
    reason = f"a probe on the encoder is off by {_stones(metrics, key)} on boards of unseen counts"
    reason += f" and exact on {_percent(metrics, exact)} of them"
    if verdict == "excluded" and metrics[f"{exact}.low"] < KNOWS:
        verdict, reason = "undecided", f"{reason}, which are too few to tell"
    control = "vision_gap.untrained.ve"
    if control not in metrics:
        return Verdict("individuation", verdict, key, reason, "no control was measured")
    if metrics[f"{control}.high"] < HALF:
        controls = (
            f"an untrained encoder does as well ({_stones(metrics, control)}): the stones are plain"
            " in the patches, and their presence is no achievement of training"
        )
    else:
        controls = f"an untrained encoder is off by {_stones(metrics, control)}"
    return Verdict("individuation", verdict, key, reason, controls)


def _magnitude(metrics: Metrics) -> Verdict:
    key, text = "comparison.gap.ve", "comparison.text.ve.near"
    if key not in metrics or text not in metrics:
        return _missing("magnitude", key)
    reason = "comparing amounts 1 to 3 apart, pictures fall short of text by {} points"
    if f"{key}.beyond_id" in metrics:  # the two need not be equally good on seen counts
        key = f"{key}.beyond_id"
        reason = "comparing amounts 1 to 3 apart, pictures lose {} points more than text beyond ID"
    verdict, reason = _side(metrics, key, MARGIN), reason.format(_points(metrics, key))
    controls = f"text itself is right in {_percent(metrics, text)} of balanced near pairs"
    if metrics[f"{text}.low"] < ABOVE_CHANCE:
        verdict, controls = "undecided", f"{controls}: the control cannot do the task"
    if "comparison.gap.id" in metrics:
        controls += f"; text less pictures is {_points(metrics, 'comparison.gap.id')} points in ID"
        controls += f", {_points(metrics, 'comparison.gap.ve')} in VE"
    return Verdict("magnitude", verdict, key, reason, controls)


def _mapping(metrics: Metrics, individuation: str, magnitude: str) -> Verdict:
    key, text = "language_gap.ve", "accuracy.text.ve.digits"
    if key not in metrics:
        return _missing("mapping", key)
    verdict = _side(metrics, key, HALF)
    reason = f"answers held to digits are off the probe's count by {_stones(metrics, key)}"
    controls = f"text names the same counts right in {_percent(metrics, text)}"
    if verdict == "supported" and metrics[f"{text}.low"] < KNOWS:
        verdict, controls = "undecided", f"{controls}: the words themselves are not known"
    elif verdict == "supported" and not individuation == magnitude == "excluded":
        earlier = [
            f"{stage} is {found}"
            for stage, found in (("individuation", individuation), ("magnitude", magnitude))
            if found != "excluded"
        ]
        verdict = "undecided"
        controls += f"; but {' and '.join(earlier)}, so the fault may lie before the naming"
    return Verdict("mapping", verdict, key, reason, controls)


def _side(metrics: Metrics, key: str, limit: float) -> str:
    """Which side of the limit the whole interval of a shortfall lies on."""
    if metrics[f"{key}.high"] < limit:
        return "excluded"
    return "supported" if metrics[f"{key}.low"] > limit else "undecided"


def _missing(stage: str, key: str) -> Verdict:
    return Verdict(stage, "undecided", key, "no examples in VE", "none")


def _stones(metrics: Metrics, key: str) -> str:
    value, low, high = (metrics[k] for k in (key, f"{key}.low", f"{key}.high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}] stones"


def _percent(metrics: Metrics, key: str) -> str:
    if key not in metrics:
        return "an unknown share"
    return f"{_points(metrics, key)} %"


def _points(metrics: Metrics, key: str) -> str:
    value, low, high = (100 * metrics[k] for k in (key, f"{key}.low", f"{key}.high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"
