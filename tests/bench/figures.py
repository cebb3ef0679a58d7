"""What a benchmark gives: a figure with its limit, and the times that it was computed from.

Times are CPU seconds of this process, so that other work on the machine counts little. Ways to
compute one thing take turns, and of each the shortest time counts.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

AT_MOST, AT_LEAST = "at most", "at least"


@dataclass(frozen=True)
class Size:
    """How much is measured. The figures mean the same at every size, they only get steadier."""

    rounds: int
    """Of everything that is compared or repeated whole."""
    steps: int
    """Of training, after three that do not count."""
    per_count: int
    """Examples of every count to evaluate on."""
    preset: str = "paper"


SIZES = {
    "small": Size(rounds=6, steps=8, per_count=1),
    "full": Size(rounds=24, steps=40, per_count=5),
}


@dataclass(frozen=True)
class Figure:
    """One measured number; no number (None) where what was compared gave different results."""

    value: float | None
    unit: str
    what: str
    timings: dict[str, list[float]]
    """Seconds, in the order in which they were taken."""
    against: str | None = None
    """What it is compared with."""
    limit: float | None = None
    bound: str | None = None
    """Whether `limit` is the most or the least."""

    @property
    def ok(self) -> bool | None:
        """Whether the results were equal and the limit is met; None where there is no limit."""
        if self.value is None or self.limit is None:
            return False if self.value is None else None
        return self.value <= self.limit if self.bound == AT_MOST else self.value >= self.limit

    @property
    def verdict(self) -> str:
        """For the table: nothing, `met`, `MISSED`, or `UNEQUAL` (the results differ)."""
        if self.value is None:
            return "UNEQUAL"
        return {None: "", True: "met", False: "MISSED"}[self.ok]

    def as_json(self) -> dict:
        timings = {name: [round(t, 6) for t in times] for name, times in self.timings.items()}
        value = None if self.value is None else round(self.value, 4)
        return {**asdict(self), "value": value, "ok": self.ok, "timings": timings}


class Race(NamedTuple):
    """CPU seconds of two ways to compute one thing; none where their results differ."""

    ours: list[float]
    other: list[float]

    @property
    def slowdown(self) -> float | None:
        """The least time of ours over the least of the other's."""
        return min(self.ours) / min(self.other) if self.ours else None

    @property
    def speedup(self) -> float | None:
        return min(self.other) / min(self.ours) if self.ours else None


def race(
    ours: Callable[[], Any],
    other: Callable[[], Any],
    *,
    same: Callable[[Any, Any], bool],
    rounds: int,
) -> Race:
    """Time both in turn, the first of a round by turns, once their results are the same."""
    found = Race([], [])
    if not same(ours(), other()):
        return found
    for i in range(rounds):
        pair = [(ours, found.ours), (other, found.other)]
        for call, times in pair if i % 2 else reversed(pair):
            times.append(seconds(call)[0])
    return found


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of one call, without the collection of garbage."""
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        return time.process_time() - cpu, time.perf_counter() - wall
    finally:
        gc.enable()
