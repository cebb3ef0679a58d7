"""The counting study's commands."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from circuits.counting.measurements import measurement
from circuits.report import print_table
from circuits.runs import Result, RunFolder
from interp.errors import InputError

_CONSOLE = Console(markup=False)
_QUIET = 20.0  # seconds

COMMANDS = {
    "diagnose": "every measurement, a verdict on each stage, a report",
    "accuracy": "right answers in pictures and in text",
    "attractors": "where wrong answers go",
    "hidden-number": "what a probe on the vision encoder still counts; vision and language gap",
    "masking": "hide stones, and see whether the answer falls by as many",
    "comparison": "as many stones as letters? by distance",
    "heads": "which heads an answer needs, pictures against text, with baselines",
    "answer-ridge": "the count as one number at the answer, read by a ridge fitted on ID",
    "paper": "the published figures beside ours, claim by claim, for several models",
    "train": "train both models of one seed",
}


def main(arguments: Sequence[str]) -> int:
    """Run one command of the study."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:14} {what}" for command, what in COMMANDS.items()]
        usage = "usage: python -m circuits counting COMMAND [options]   (COMMAND --help says more)"
        print("\n".join([usage, "", *lines]))
        return 0
    if name not in COMMANDS:
        raise InputError(f"no command {name!r}; there are {', '.join(COMMANDS)}")
    run = {"diagnose": _diagnose, "paper": _paper, "train": _train}.get(name, _measure)
    run(name, rest)
    return 0


def _diagnose(name: str, arguments: Sequence[str]) -> None:
    from circuits.counting import diagnose

    config = _parsed(diagnose.Config, name, arguments)
    with _shown() as progress:
        path = diagnose.run(config, progress)
    for table in diagnose.tables(path):
        print_table(_CONSOLE, table)
    _CONSOLE.print(f"run folder: {path}\nreport:     {path / 'report.html'}", soft_wrap=True)


def _paper(name: str, arguments: Sequence[str]) -> None:
    from circuits.counting import claims, paper

    config = _parsed(paper.Config, name, arguments)
    with _shown() as progress:
        found = paper.run(config, progress)
    for table in (claims.ours(found), claims.beyond(found), claims.overview(found)):
        print_table(_CONSOLE, table)
    _CONSOLE.print(f"the same as a page: {paper.page_of(config)}", soft_wrap=True)


def _train(name: str, arguments: Sequence[str]) -> None:
    from circuits.counting import training

    config = _parsed(training.Config, name, arguments)
    with _shown() as progress:
        path = training.run(config, progress)
    _CONSOLE.print(f"models, cards and curves: {path}", soft_wrap=True)


def _measure(name: str, arguments: Sequence[str]) -> None:
    module = measurement(name)
    told = tyro.conf.arg(help="The run folder to write; without it the table is only printed.")
    out = [("out", Annotated[Path | None, told], field(default=None))]
    asked = _parsed(
        make_dataclass("Config", out, bases=(module.Config,), frozen=True), name, arguments
    )
    config = module.Config(**{f.name: getattr(asked, f.name) for f in fields(module.Config)})
    with _shown() as progress:
        result = _kept(name, module, config, asked.out, progress)
    print_table(_CONSOLE, module.table(result))


def _kept(
    name: str, module: ModuleType, config: Any, out: Path | None, progress: Callable
) -> Result:
    """The result, written to a run folder if one was named."""
    if out is None:
        return module.run(config, progress=progress)
    facts = json.loads(json.dumps(asdict(config), default=str))
    with RunFolder.open(out, command=f"counting {name}", config=facts) as folder:
        result = folder.step(name, lambda: module.run(config, progress=progress))
        folder.figure(name, module.figure(result))
        folder.finish(result.metrics)
    return result


def _parsed(kind: type, name: str, arguments: Sequence[str]) -> Any:
    return tyro.cli(kind, prog=f"python -m circuits counting {name}", args=list(arguments))


@contextmanager
def _shown() -> Iterator[Callable[[str, float], None]]:
    """Progress: a bar in a terminal, elsewhere a line for every new thing that is done."""
    if not _CONSOLE.is_terminal:
        yield _Lines()
        return
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    what = TextColumn("{task.description}", markup=False)
    with Progress(*columns, what, console=_CONSOLE) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
        bar.update(task, completed=1.0, description="done")


class _Lines:
    """A line for every new thing (up to the first comma) and after 20 seconds of the same one."""

    def __init__(self) -> None:
        self._start = self._told = time.monotonic()
        self._last = ""

    def __call__(self, what: str, share: float) -> None:
        what, now = what.split(",")[0], time.monotonic()
        if what != self._last or now - self._told >= _QUIET:
            self._last, self._told = what, now
            print(f"{now - self._start:6.1f} s  {100 * share:3.0f} %  {what}", flush=True)
