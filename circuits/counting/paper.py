"""The published figures beside ours, for several models and all their seeds.

Each model is diagnosed with all its seeds; from these runs alone come the tables and the page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from circuits.counting import claims, diagnose
from circuits.counting.cards import model_folder, shipped_seeds
from circuits.counting.claims import Seeds
from circuits.counting.presets import TASKS
from circuits.counting.subject import Progress, silent
from circuits.counting.verdict import verdict_metrics
from circuits.places import put_file
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
        InputError: no model, one that is named twice, or what `diagnose.run` refuses.
    """
    names = [Path(model).name for model in config.models]
    if not names or len(set(names)) != len(names):
        given = ", ".join(config.models) or "none"
        raise InputError(f"models: {given}; name at least one, each once")
    for model in config.models:  # before anything is measured
        if not shipped_seeds(model):
            model_folder(model, TASKS[0], 0)
    found: dict[str, Seeds] = {}
    for name, model in zip(names, config.models, strict=True):
        path = diagnose.run(_diagnosis(config, model, name), progress, keep=True)
        found[name] = _metrics(path)
    put_file(config.out / "findings.md", page(config, found).encode())
    return found


def _metrics(path: Path) -> Seeds:
    """What a diagnosis found and concluded, seed by seed."""
    found = {seed: diagnose.joined(own) for seed, own in diagnose.by_seed(path).items()}
    return {seed: {**metrics, **verdict_metrics(metrics)} for seed, metrics in found.items()}


def _diagnosis(config: Config, model: str, name: str) -> diagnose.Config:
    return diagnose.Config(
        model=model,
        data_seed=config.data_seed,
        per_count=config.per_count,
        device=config.device,
        out=config.out / name,
        all_seeds=True,
    )


def page(config: Config, found: Mapping[str, Seeds]) -> str:
    """The findings as a page of Markdown: the overview, then every claim with our numbers."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["table"] = _markdown
    return (
        environment.from_string(_TEMPLATE.read_text("utf-8")).render(
            command=command(config),
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
    options = [f"--models {' '.join(config.models)}", f"--per-count {config.per_count}"]
    if config.data_seed:
        options.append(f"--data-seed {config.data_seed}")
    return f"python -m circuits counting paper {' '.join(options)} --out runs/paper"


def _markdown(table: Table) -> str:
    rows: Iterator[Sequence[str]] = iter([table.columns, ["---"] * len(table.columns), *table.rows])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
