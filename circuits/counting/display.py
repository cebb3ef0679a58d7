"""How numbers of the counting study are written and drawn, the same everywhere."""

from collections.abc import Mapping

from matplotlib.axes import Axes

MODALITY_STYLE = {
    "vision": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "text": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
}
"""Okabe-Ito blue and vermilion, told apart by marker and line too."""


def percent(metrics: Mapping, key: str) -> str:
    """A share and its interval: `12.5 [10.4, 15.0]`; a dash where there is none."""
    return _interval(metrics, key, 100.0, 1)


def stones(metrics: Mapping, key: str) -> str:
    """A number of stones and its interval."""
    return _interval(metrics, key, 1.0, 2)


def _interval(metrics: Mapping, key: str, scale: float, digits: int) -> str:
    if key not in metrics:
        return "-"
    value, low, high = (scale * metrics[k] for k in (key, f"{key}.low", f"{key}.high"))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def mark_regimes(ax: Axes, regimes: Mapping[str, list[int]]) -> None:
    """Light bands with the names of the regimes along the top; x is the count."""
    for i, (name, (first, last)) in enumerate(regimes.items()):
        ax.axvspan(first - 0.5, last + 0.5, color="0.5", alpha=(0.0, 0.10, 0.20)[i % 3], lw=0)
        ax.text((first + last) / 2, 0.99, name.upper(), transform=ax.get_xaxis_transform(),
                ha="center", va="top", size=8, color="0.3")  # fmt: skip
