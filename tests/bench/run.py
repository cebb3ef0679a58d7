"""`python -m tests.bench`: measures, prints a table as it goes, and writes `.bench/bench.json`.

The exit code is 1 where results that must be equal differ: such a figure has no value. A limit that
is missed is printed (MISSED, and again at the end) and leaves the code at 0: a busy machine must
fail nothing. Bad arguments: 2.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from circuits.places import put_file
from tests.bench import toy
from tests.bench.figures import SIZES, Figure, Size

BENCHMARKS = {
    "toy.hooks_overhead": toy.hooks_overhead,
    "toy.train": toy.train,
    "toy.answers": toy.answers,
    "toy.evaluate": toy.evaluate,
}
"""What can be measured. Each takes a `Size` and gives figures by key, one after the other."""

OUT = Path(".bench/bench.json")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("key", nargs="*", help=f"all, or some of: {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "--size", help=f"{' or '.join(SIZES)}; $SIZE if not given, else full (about 3 minutes)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"the file to write: {OUT}")
    given = parser.parse_args(arguments)
    size = given.size or os.environ.get("SIZE") or "full"
    for name, known in ((size, SIZES), *((key, BENCHMARKS) for key in given.key)):
        if name not in known:
            parser.error(f"no {name!r}; there are {', '.join(known)}")
    if given.out.is_dir() or given.out.parent.is_file():
        parser.error(f"{given.out} cannot be a file; --out names the file to write")
    found = measure(given.key or list(BENCHMARKS), SIZES[size], name=size, out=given.out)
    return exit_code(found)


def measure(
    keys: Sequence[str], size: Size, *, name: str, out: Path, threads: int = 1
) -> dict[str, Figure]:
    """Run benchmarks; the file holds what this run measured, and on which machine."""
    before, found = torch.get_num_threads(), {}
    torch.set_num_threads(threads)
    facts = machine() | {"size": name}
    try:
        for key in keys:
            for one, figure in BENCHMARKS[key](size):
                found[one] = figure
                print(row(one, figure), flush=True)
    finally:
        torch.set_num_threads(before)
    content = {key: figure.as_json() for key, figure in found.items()} | {"machine": facts}
    put_file(out, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    print("\n".join([*complaints(found), str(out)]))
    return found


def exit_code(found: dict[str, Figure]) -> int:
    return int(any(figure.value is None for figure in found.values()))


def row(key: str, figure: Figure) -> str:
    """A line of the table: key, value, limit, verdict."""
    value = "-" if figure.value is None else f"{figure.value:.4g}"
    limit = "" if figure.limit is None else f"{figure.bound} {figure.limit:g}"
    return f"{key:<28}{value:>8} {figure.unit:<12}{limit:<15}{figure.verdict}".rstrip()


def complaints(found: dict[str, Figure]) -> list[str]:
    """What is not as it should be, a line each."""
    says = {"UNEQUAL": "the results differ, so nothing was timed", "MISSED": "limit missed"}
    return [f"{key}: {says[f.verdict]}" for key, f in found.items() if f.ok is False]


def machine() -> dict[str, str | int | float]:
    return {
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    """The processor's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
