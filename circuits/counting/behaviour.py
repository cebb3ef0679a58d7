"""How well does the model count, in pictures and in text? (arXiv:2605.30170, section 4.)"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from circuits.counting.display import MODALITY_STYLE, mark_regimes, percent
from circuits.counting.questions import MODALITIES
from circuits.counting.subject import Progress, Setting, Subject, silent
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.stats import proportion


@dataclass(frozen=True)
class Config(Setting):
    """Accuracy of free answers and of answers held to digits, by regime and by count."""


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Shares of right answers, and of answers that are no number.

    `accuracy.{modality}.{regime}`: free answers, right when they are exactly the two digits.
    `.digits`: answers held to two digits. `no_number.{modality}.{regime}`: free answers that are
    anything else than two digits. All with Wilson intervals.
    """
    subject = subject or Subject.load(config)
    counts, metrics, data = subject.examples.counts, {}, {"regimes": subject.edges}
    for modality in MODALITIES:
        free = subject.answers(modality, progress=progress)
        digits = subject.answers(modality, digits=True, progress=progress)
        for regime, own in subject.regimes.items():
            key = f"accuracy.{modality}.{regime}"
            metrics |= interval_metrics(key, proportion((free == counts)[own]))
            metrics |= interval_metrics(f"{key}.digits", proportion((digits == counts)[own]))
            none = proportion((free == -1)[own])
            metrics |= interval_metrics(f"no_number.{modality}.{regime}", none)
        data[modality] = by_count(counts, free == counts)
        data[f"{modality}.digits"] = by_count(counts, digits == counts)
    return Result(metrics, data)


def by_count(
    counts: Int[np.ndarray, " example"], right: Bool[np.ndarray, " example"]
) -> list[dict]:
    """Share of right answers of every count, with its interval."""
    return [
        {"count": int(count), **proportion(right[counts == count])._asdict()}
        for count in np.unique(counts)
    ]


def figure(result: Result) -> Figure:
    """Accuracy against the count: free answers above, answers held to digits below."""
    fig, axes = plt.subplots(2, 1, figsize=(7.5, 4.6), sharex=True, layout="constrained")
    for ax, suffix, title in zip(
        axes, ("", ".digits"), ("free", "held to two digits"), strict=True
    ):
        for modality in MODALITIES:
            rows = result.data[modality + suffix]
            x, y = [r["count"] for r in rows], [r["value"] for r in rows]
            style = MODALITY_STYLE[modality]
            ax.plot(x, y, ms=4, lw=1.2, label=modality, **style)
            low, high = [r["low"] for r in rows], [r["high"] for r in rows]
            ax.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)
        ax.set(ylabel=f"right answers,\n{title}", ylim=(-0.04, 1.09))
        mark_regimes(ax, result.data["regimes"])
    axes[0].legend(frameon=False, loc="lower left")
    axes[1].set_xlabel("black stones (pictures) or letters c (text)")
    return fig


def table(result: Result) -> Table:
    """One row for each modality and regime."""
    rows = []
    for modality in MODALITIES:
        for regime in result.data["regimes"]:
            keys = [f"accuracy.{modality}.{regime}", f"accuracy.{modality}.{regime}.digits"]
            cells = [
                percent(result.metrics, key) for key in (*keys, f"no_number.{modality}.{regime}")
            ]
            rows.append([modality, regime.upper(), *cells])
    return Table(
        "Right answers, % [95 % interval]",
        ["modality", "regime", "free answer", "held to digits", "no number"],
        rows,
    )
