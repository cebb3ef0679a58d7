"""Where do wrong answers go? (arXiv:2605.30170, section 4: answers fall back to a few numbers.)"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from circuits.counting.boards import World
from circuits.counting.display import percent
from circuits.counting.questions import MODALITIES
from circuits.counting.subject import Progress, Setting, Subject, silent
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.stats import Interval, bootstrap_mean, proportion


@dataclass(frozen=True)
class Config(Setting):
    """The numbers named most often, and how far off answers are."""

    top: int = 5
    """How many attractors of each regime are listed."""


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Shares of the numbers named, among answers held to digits.

    `attractor.{modality}.{regime}.answer_{n}`: share of all answers that are n (the `top` most
    frequent; Wilson). `tens.{modality}.{regime}`, `units....`: share with the right digit.
    `bias.{modality}.{regime}`: mean answer less the true count, in stones (bootstrap by count);
    `attractor.{modality}.{regime}.free_{n}`: the same among free answers (which may be no number).
    `spread.{modality}.{regime}`: mean distance of answers from the median answer of their count,
    in stones (bootstrap by count). `topology.{modality}.{regime}.{where}`: share of answers that
    are the largest count seen as pictures (`edge`), lie in the last decade known from text
    (`last_decade`), are below 10 (`small`), any of these (`attractors`), or have a tens digit
    seen with pictures (`seen_decades`). What the text is answered with is the control:
    `topology.excess.{regime}.{where}` is the share of pictures less that of texts (bootstrap by
    count).
    """
    if config.top < 1:
        raise InputError(f"top is {config.top}; ask for at least 1 attractor")
    subject = subject or Subject.load(config)
    counts, metrics, data = subject.examples.counts, {}, {"regimes": subject.edges}
    places = {}
    for modality in MODALITIES:
        digits = subject.answers(modality, digits=True, progress=progress)
        free = subject.answers(modality, progress=progress)
        places[modality] = topology(digits, subject.world)
        for regime, own in subject.regimes.items():
            place = f"{modality}.{regime}"
            for kind, answers in (("answer", digits[own]), ("free", free[own])):
                for number in most_named(answers, config.top):
                    share = proportion(answers == number)
                    metrics |= interval_metrics(f"attractor.{place}.{kind}_{number}", share)
            metrics |= _digit_metrics(place, digits[own], counts[own])
            for where, there in places[modality].items():
                metrics |= interval_metrics(f"topology.{place}.{where}", proportion(there[own]))
        data[modality] = _confusion(counts, digits)
    for regime, own in subject.regimes.items():
        for where, seen in places["vision"].items():
            more = seen[own].astype(int) - places["text"][where][own]
            interval = bootstrap_mean(more, groups=counts[own])
            metrics |= interval_metrics(f"topology.excess.{regime}.{where}", interval)
    return Result(metrics, data)


def most_named(answers: Int[np.ndarray, " example"], top: int) -> list[int]:
    """The numbers named most often, most frequent first, smaller ones first among equals."""
    numbers, times = np.unique(answers[answers >= 0], return_counts=True)
    return [int(n) for n in numbers[np.lexsort((numbers, -times))][:top]]


def topology(
    answers: Int[np.ndarray, " example"], world: World
) -> dict[str, Bool[np.ndarray, " example"]]:
    """Which answers lie in the places that the paper calls attractors (section 4)."""
    tens = answers // 10
    places = {
        "edge": answers == world.vision_max,
        "last_decade": tens == world.text_max // 10,
        "small": tens == 0,
    }
    attractors = np.any(list(places.values()), axis=0)
    seen_decades = tens <= world.vision_max // 10
    return places | {"attractors": attractors, "seen_decades": seen_decades}


def off_median(
    answers: Int[np.ndarray, " example"], counts: Int[np.ndarray, " example"]
) -> Float[np.ndarray, " example"]:
    """Distance of each answer from the median answer of its count, in stones."""
    medians = {count: np.median(answers[counts == count]) for count in np.unique(counts)}
    return np.abs(answers - np.array([medians[count] for count in counts]))


def _digit_metrics(
    place: str, answers: Int[np.ndarray, " example"], counts: Int[np.ndarray, " example"]
) -> dict[str, float | int]:
    shares: dict[str, Interval] = {
        f"tens.{place}": proportion(answers // 10 == counts // 10),
        f"units.{place}": proportion(answers % 10 == counts % 10),
        f"bias.{place}": bootstrap_mean(answers - counts, groups=counts),
        f"spread.{place}": bootstrap_mean(off_median(answers, counts), groups=counts),
    }
    found: dict[str, float | int] = {}
    for key, interval in shares.items():
        found |= interval_metrics(key, interval)
    return found


def _confusion(
    counts: Int[np.ndarray, " example"], answers: Int[np.ndarray, " example"]
) -> list[dict]:
    """How often each count was answered with each number."""
    pairs, times = np.unique(np.stack([counts, answers]), axis=1, return_counts=True)
    return [
        {"count": int(c), "answer": int(a), "times": int(t)}
        for (c, a), t in zip(pairs.T, times, strict=True)
    ]


def figure(result: Result) -> Figure:
    """Answer (held to digits) against count, area by share of that count's answers."""
    fig, axes = plt.subplots(1, 2, figsize=(7.8, 4.0), sharey=True, layout="constrained")
    for ax, modality in zip(axes, MODALITIES, strict=True):
        rows = result.data[modality]
        total = {
            c: sum(r["times"] for r in rows if r["count"] == c) for c in {r["count"] for r in rows}
        }
        share = np.array([r["times"] / total[r["count"]] for r in rows])
        x, y = [r["count"] for r in rows], [r["answer"] for r in rows]
        dots = ax.scatter(x, y, s=4 + 26 * share, c=share, cmap="viridis_r", vmin=0, vmax=1)
        ends = [min(x), max(x)]
        ax.plot(ends, ends, color="0.6", lw=0.8, zorder=0)
        for first, _ in list(result.data["regimes"].values())[1:]:
            ax.axvline(first - 0.5, color="0.6", lw=0.8, ls=":")
        ax.set(title=modality, xlabel="true count")
    axes[0].set_ylabel("answer, held to two digits")
    fig.colorbar(dots, ax=axes.tolist(), label="share of the count's answers")
    return fig


def table(result: Result) -> Table:
    """One row for each modality and regime: the most frequent answers, bias, digits."""
    rows = []
    for modality in MODALITIES:
        for regime in result.data["regimes"]:
            place = f"{modality}.{regime}"
            metrics = result.metrics
            rows.append(
                [
                    modality,
                    regime.upper(),
                    _named(metrics, place),
                    f"{metrics[f'bias.{place}']:+.2f}",
                    f"{metrics[f'spread.{place}']:.2f}",
                    f"{100 * metrics[f'tens.{place}']:.1f}",
                    f"{100 * metrics[f'units.{place}']:.1f}",
                    percent(metrics, f"topology.{place}.edge"),
                    percent(metrics, f"topology.{place}.seen_decades"),
                ]
            )
    columns = ["modality", "regime", "most frequent answers (%)", "bias (stones)"]
    columns += ["spread (stones)", "tens right (%)", "units right (%)", "at the edge (%)"]
    return Table("Answers held to two digits", [*columns, "in seen decades (%)"], rows)


def _named(metrics: dict, place: str) -> str:
    head = f"attractor.{place}.answer_"
    keys = [k for k in metrics if k.startswith(head) and k.removeprefix(head).isdigit()]
    return ", ".join(f"{k.removeprefix(head)} ({100 * metrics[k]:.0f})" for k in keys[:3])
