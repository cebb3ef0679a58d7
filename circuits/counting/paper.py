"""The published figures beside ours, for several models and all their seeds.

Each model is diagnosed with all its seeds; from these runs alone come the tables and the page.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from circuits.counting import claims, diagnose
from circuits.counting.claims import Seeds
from circuits.counting.presets import PRESETS
from circuits.counting.subject import Progress, silent
from circuits.counting.verdict import verdict_metrics
from circuits.places import made_here, put_file, resolved
from circuits.report import Table
from interp.errors import InputError

_TEMPLATE = Path(__file__).with_name("findings.md.j2")


@dataclass(frozen=True)
class Config:
    """The paper's figures beside ours, claim by claim (arXiv:2605.30170)."""

    out: Path = Path("runs/paper")
    """A folder for the diagnoses, one a model, and for findings.md. What is there and was made with
    the same configuration, weights and code is not made again."""
    models: tuple[str, ...] = ("tiny", "heads", "paper")
    """Presets, or folders that `circuits counting train` wrote."""
    per_count: int = 20
    """Fresh test examples of every count."""
    data_seed: int = 0
    """Seed of the test examples."""
    device: str = "cpu"
    """Where the models run: cpu, cuda, cuda:1, ..."""


def run(config: Config, progress: Progress = silent) -> dict[str, Seeds]:
    """Diagnose what is not diagnosed yet, write findings.md, and give all metrics.

    Raises:
        InputError: no model, two of one name, a place that is taken, or what `diagnose.run`
            refuses.
    """
    diagnoses = _diagnoses(config)
    for diagnosis in diagnoses.values():  # before anything is measured
        diagnose.check(diagnosis)
    _check_page(config)
    found: dict[str, Seeds] = {}
    for name, diagnosis in diagnoses.items():
        found[name] = _metrics(diagnose.run(diagnosis, progress, keep=True))
    put_file(page_of(config), page(config, found).encode("utf-8", "backslashreplace"))
    return found


def page_of(config: Config) -> Path:
    """Where findings.md is written."""
    return resolved(config.out) / "findings.md"


def _check_page(config: Config) -> None:
    place = page_of(config)
    if place.is_dir():
        raise InputError(f"{place} is a folder, and the findings are a file: take another --out")
    if made_here(place.parent / "config.json"):
        raise InputError(f"{place.parent} is a run of its own: take another --out")


def _metrics(path: Path) -> Seeds:
    """What a diagnosis found and concluded, seed by seed."""
    found: dict[int, claims.Metrics] = {}
    for seed, results in diagnose.by_seed(path).items():
        metrics = diagnose.joined(results)
        fe = results["attractors"].data["regimes"].get("fe")
        last = {} if fe is None else {"fe.last": fe[1]}  # answers of three digits from 100 on
        found[seed] = {**metrics, **verdict_metrics(metrics), **last}
    return found


def _diagnoses(config: Config) -> dict[str, diagnose.Config]:
    """By the name of the model: of a folder the last part of its path."""
    found: dict[str, diagnose.Config] = {}
    for model in config.models:
        name = model if model in PRESETS else resolved(model).name
        if name in found:
            raise InputError(
                f"{found[name].model} and {model} would both be written to {name}: give models of"
                " different names, each once"
            )
        found[name] = diagnose.Config(
            model=model,
            data_seed=config.data_seed,
            per_count=config.per_count,
            device=config.device,
            out=config.out / name,
            all_seeds=True,
        )
    if not found:
        raise InputError("no models: name at least one, a preset or a folder")
    return found


def page(config: Config, found: Mapping[str, Seeds]) -> str:
    """The findings as a page of Markdown: the overview, then every claim with our numbers."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["table"] = _markdown
    return (
        environment.from_string(_TEMPLATE.read_text("utf-8")).render(
            command=command(config),
            widest=round(100 * claims.WIDEST),
            tally=claims.tally(found),
            overview=claims.overview(found),
            details=claims.details(found),
            beyond=claims.beyond(found),
            verdict=claims.verdict,
            presets=found,
        )
        + "\n"
    )


def command(config: Config) -> str:
    """What makes these numbers again."""
    options = ["--models", *config.models, "--per-count", str(config.per_count)]
    for name, value in (("--data-seed", config.data_seed), ("--device", config.device)):
        if value != getattr(Config, name[2:].replace("-", "_")):
            options += [name, str(value)]
    return shlex.join(["python", "-m", "circuits", "counting", "paper", *options, "--out",
                       str(config.out)])  # fmt: skip


def _markdown(table: Table) -> str:
    rows: Iterator[Sequence[str]] = iter([table.columns, ["---"] * len(table.columns), *table.rows])
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
