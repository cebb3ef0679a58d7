"""Where does visual counting break? Every measurement, on one model or on all its seeds.

The result is a run folder: metrics.json, figures, report.html, and each measurement's data.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from circuits.counting import report
from circuits.counting.cards import load, model_folder, shipped_seeds
from circuits.counting.measurements import MODULES, measurement
from circuits.counting.presets import TASKS
from circuits.counting.subject import Progress, Setting, Subject, silent, weights_seed
from circuits.counting.verdict import verdict_metrics
from circuits.places import free
from circuits.report import Table
from circuits.runs import Result, RunFolder, is_done, read_run
from interp.errors import InputError

COMMAND = "counting diagnose"


@dataclass(frozen=True)
class Config(Setting):
    """Run every measurement and say at which stage counting breaks."""

    out: Path = Path("runs/diagnose")
    """The run folder to write; a complete run that is there is replaced."""
    all_seeds: bool = False
    """All shipped seeds side by side, instead of one."""


def run(config: Config, progress: Progress = silent, *, keep: bool = False) -> Path:
    """Measure and write the run folder; gives its path. `tables` has what it says in brief.

    With `keep`, a complete run of the same configuration, weights and code is left as it is.

    Metrics are flat: `accuracy.vision.ve`, with `.low`, `.high` and `.n`; with `all_seeds` each
    begins with its seed, as in `seed_0.accuracy.vision.ve`.

    Raises:
        InputError: what `Subject.load` and `RunFolder.open` refuse.
    """
    seeds = _seeds(config)
    settings = {seed: _setting(config, seed) for seed in seeds}
    subjects = {seed: Subject.load(setting) for seed, setting in settings.items()}
    facts = {**_plain(config), "seeds": seeds, **_inputs(config, seeds)}
    if keep and is_done(config.out, command=COMMAND, config=facts):
        return config.out
    with RunFolder.open(config.out, command=COMMAND, config=facts) as folder:
        if folder.notice:
            progress(folder.notice, 0.0)
        found = {}
        for i, (seed, setting) in enumerate(settings.items()):
            steps = _steps(setting, subjects[seed], _part(progress, i, len(seeds)))
            found[seed] = {
                name: folder.step(f"seed_{seed}.{name}", compute) for name, compute in steps
            }
        verdicts = {seed: verdict_metrics(joined(results)) for seed, results in found.items()}
        metrics = _named(found, verdicts, prefixed=config.all_seeds)
        page = report.page(config, found, verdicts, figures=_figures(folder, found))
        folder.write("report.html", page)
        folder.finish(metrics)
    return folder.path


def check(config: Config) -> None:
    """Refuse what `run` would refuse in models and in the place to write, measuring nothing.

    Raises:
        InputError: no such model or seed, files that are broken, a place that is taken.
    """
    _inputs(config, _seeds(config))
    free(config.out)


def tables(path: str | Path) -> list[Table]:
    """The summary and the verdicts of a run folder, made again without a model.

    Raises:
        InputError: there is no complete diagnosis.
    """
    found = by_seed(path)
    verdicts = {seed: verdict_metrics(joined(results)) for seed, results in found.items()}
    return [*report.summary(found), report.verdict_table(verdicts)]


def by_seed(path: str | Path) -> dict[int, dict[str, Result]]:
    """The results of a run folder, by seed and measurement.

    Raises:
        InputError: there is no complete diagnosis.
    """
    found: dict[int, dict[str, Result]] = {}
    for step, result in read_run(path).results.items():
        seed, name = step.removeprefix("seed_").split(".", 1)
        found.setdefault(int(seed), {})[name] = result
    return found


def joined(results: Mapping[str, Result]) -> dict[str, float | int | str]:
    """The metrics of all measurements of one seed."""
    return {key: value for result in results.values() for key, value in result.metrics.items()}


def _steps(
    setting: Setting, subject: Subject, progress: Progress
) -> Iterator[tuple[str, Callable[[], Result]]]:
    for i, name in enumerate(MODULES):
        module = measurement(name)
        config = module.Config(**{f.name: getattr(setting, f.name) for f in fields(setting)})

        def told(what: str, share: float, name: str = name, i: int = i) -> None:
            said = f"seed {setting.weights_seed}: {name}: {what}"
            progress(said, (i + share) / len(MODULES))

        yield (
            name,
            lambda module=module, config=config, told=told: module.run(config, subject, told),
        )


def _part(progress: Progress, i: int, n: int) -> Progress:
    """The progress of part i of n equal ones, as progress of the whole."""
    return lambda what, share: progress(what, (i + share) / n)


def _figures(
    folder: RunFolder, found: Mapping[int, Mapping[str, Result]]
) -> dict[tuple[int, str], bytes]:
    return {
        (seed, name): folder.figure(f"{name}_seed_{seed}", measurement(name).figure(result))
        for seed, results in found.items()
        for name, result in results.items()
    }


def _named(found: Mapping, verdicts: Mapping, *, prefixed: bool) -> dict:
    metrics: dict = {}
    for seed, results in found.items():
        prefix = f"seed_{seed}." if prefixed else ""
        metrics |= {prefix + k: v for k, v in {**joined(results), **verdicts[seed]}.items()}
    return metrics


def _setting(config: Config, seed: int) -> Setting:
    values = {f.name: getattr(config, f.name) for f in fields(Setting)}
    return Setting(**{**values, "weights_seed": seed})


def _seeds(config: Config) -> list[int]:
    if config.all_seeds and config.weights_seed is not None:
        raise InputError("--all-seeds and --weights-seed exclude each other; give one")
    seeds = shipped_seeds(config.model) if config.all_seeds else [weights_seed(config)]
    if not seeds:
        model_folder(config.model, TASKS[0], 0)  # says that none ships, and what to do
    return seeds


def _plain(config: Config) -> dict:
    return {
        k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items() if k != "out"
    }


def _inputs(config: Config, seeds: list[int]) -> dict:
    """Checksums of what the run reads: a changed file is another run."""
    weights = {
        f"seed_{seed}.{task}": load(model_folder(config.model, task, seed))[1]["sha256"]
        for seed in seeds
        for task in TASKS
    }
    data = None
    if config.data is not None:
        data = hashlib.sha256(Path(config.data).read_bytes()).hexdigest()
    return {"weights": weights, "data_sha256": data}
