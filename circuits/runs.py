"""Where does the work of a long run go? Into a folder that appears whole or not at all.

While `RUN` is being made everything lies in `RUN.partial`, and each finished step is saved there
(`run/results/NAME.json`), so that a killed run goes on where it stood. `finish` puts the folder in
its place with one system call: whoever looks sees the old run or the new one.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from circuits.places import (
    MADE_BY,
    check_place,
    contents,
    discard,
    free,
    locked,
    made_here,
    make,
    one_line,
    partial_of,
    put,
    remove_empty,
    remove_work,
    resolved,
    restore,
    sync,
)
from interp.errors import InputError
from interp.stats import Interval

_IDENTITY = ("command", "config", "version", "code")  # what must agree to go on with a work
_PACKAGES = ("torch", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Result:
    """What a step found: flat numbers for metrics.json, and what figures and tables are made of."""

    metrics: dict[str, float | int | str]
    data: dict


class SavedRun(NamedTuple):
    """A complete run, read back: config.json, metrics.json and the result of each step."""

    config: dict
    metrics: dict[str, float | int | str]
    results: dict[str, Result]


def interval_metrics(key: str, interval: Interval) -> dict[str, float | int | str]:
    """An estimate as flat metrics: `key`, `key.low`, `key.high` and `key.n`."""
    value, low, high, n = interval
    return {key: value, f"{key}.low": low, f"{key}.high": high, f"{key}.n": n}


def read_run(path: str | Path) -> SavedRun:
    """Read a complete run.

    Raises:
        InputError: there is no complete run, or one of its files is missing or broken.
    """
    folder = resolved(path)
    config = made_here(folder / "config.json")
    if config is None:
        raise InputError(f"{folder} is no complete run: it has no config.json of ours")
    steps = [name for name in config.get("files", []) if name.startswith("results/")]
    try:
        with one_line("read", folder):
            metrics = json.loads((folder / "metrics.json").read_bytes())
            results = {Path(name).stem: _result((folder / name).read_bytes()) for name in steps}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"the run in {folder} has a broken file: {error!r}") from error
    return SavedRun(config, metrics, results)


def is_done(path: str | Path, *, command: str, config: dict) -> bool:
    """Whether a complete run of this command, configuration and code lies there."""
    with suppress(InputError):
        kept, own = read_run(path).config, _work(command, config)
        whole = contents(resolved(path)).issuperset(kept.get("files", []))
        return whole and all(kept.get(key) == own[key] for key in _IDENTITY)
    return False


class RunFolder:
    """A run in the making: `with RunFolder.open(...) as run:`, then `finish`.

    Left before `finish`, finished steps and files in `scratch` stay in `RUN.partial` for the next
    try. Where there are none nothing stays, nor the folders that were made for it.

    Attributes:
        path: where the run will be.
        scratch: a folder for checkpoints, to be made by who needs it; no part of the run.
        notice: one line on the earlier try that was found, or nothing.
        resumed: whether its finished steps and its scratch files are there.
    """

    def __init__(self, path: Path, work: dict, made: list[Path]) -> None:
        """Use `open`."""
        self.path, self._made, self._began = path, made, time.monotonic()
        self._partial = partial_of(path)
        self._run, self.scratch = self._partial / "run", self._partial / "scratch"
        self._lock: int | None = locked(self._partial)
        try:
            self._work, self.notice = self._take_up(work)
        except BaseException:
            self.close()
            raise
        self.resumed = bool(self._begun())
        self._earlier = sum(self._work["seconds"].values())

    @classmethod
    def open(cls, path: str | Path, *, command: str, config: dict) -> "RunFolder":
        """Begin a run, or take up an earlier try of the same command, configuration and code.

        An earlier try of anything else is thrown away, and `notice` says so.

        Raises:
            InputError: the place holds something that is not a run, cannot be written, or is
                being worked on by another process; or `config` is not JSON. Nothing was changed.
        """
        place = free(path)
        made: list[Path] = []
        with one_line("write", place):
            work = _work(command, config)
            try:
                make(partial_of(place), made)
                return cls(place, work, made)
            except BaseException:
                remove_empty(made)
                raise

    def step(self, name: str, compute: Callable[[], Result]) -> Result:
        """The saved result of this step; else what `compute` gives, saved.

        Either way it has been through JSON: tuples are lists, and keys are strings.

        Raises:
            InputError: the result is not JSON, or cannot be written.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise InputError(
                f"no file can be named after step {name!r}: use letters, digits, - . _"
            )
        file = self._run / "results" / f"{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing or broken
            return _result(file.read_bytes())
        start = time.monotonic()
        found = compute()
        content = _dumped({"metrics": found.metrics, "data": found.data}, f"the result of {name}")
        self._store(file, content)
        self._work["seconds"][name] = round(time.monotonic() - start, 3)
        self._store(self._partial / "work.json", _dumped(self._work, "work.json"))
        return _result(content)

    def write(self, relative: str, content: bytes | str) -> None:
        """Put a file into the run, with the folders above it.

        Raises:
            InputError: it would lie outside the run or on a file of the run's own, or cannot be
                written.
        """
        parts = PurePosixPath(relative).parts
        own = not parts or parts[0] in ("config.json", "metrics.json", "results")
        if own or parts[0] == "/" or ".." in parts:
            raise InputError(f"{relative!r} is no place for a file in a run: take another name")
        self._store(self._run / relative, content.encode() if isinstance(content, str) else content)

    def figure(self, name: str, fig: Figure) -> bytes:
        """Save a figure as figures/NAME.png, 150 dots an inch; close it; give the file's bytes."""
        buffer = BytesIO()
        fig.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        plt.close(fig)
        self.write(f"figures/{name}.png", buffer.getvalue())
        return buffer.getvalue()

    def finish(self, metrics: dict[str, float | int | str]) -> None:
        """Write metrics.json and config.json, and put the run in its place in one step.

        Raises:
            InputError: the metrics are not JSON, something else lies in the place by now, or
                writing failed. The place is as it was, and finished steps stay for the next try.
        """
        if gone := sorted(set(self._work["seconds"]) - set(self._begun())):
            raise InputError(f"{self._run} lost the results of {', '.join(gone)}: run it again")
        self._store(self._run / "metrics.json", _dumped(metrics, "metrics", indent=2))
        with one_line("read", self._run):
            files = sorted(contents(self._run) - {"config.json"})
        config = _dumped(self._config(files), "config.json", indent=2)
        self._store(self._run / "config.json", config)
        with one_line("write", self.path):
            check_place(self.path)
            put(self._run, self.path, self._partial / "replaced")
        with suppress(OSError):  # the run is in its place; what is left is cleared by the next one
            sync(self.path.parent)
            discard(self._partial / "replaced")
            remove_work(self._partial)
        self._release()

    def close(self) -> None:
        """Stop working; after `finish` there is nothing to do."""
        if self._lock is None:
            return
        with suppress(OSError):
            if not self._begun():
                remove_work(self._partial)
                remove_empty(self._made)
        self._release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take_up(self, work: dict) -> tuple[dict, str]:
        """The work to go on with, and the notice; of `run/` only finished steps are kept."""
        restore(self._partial / "replaced", self.path)
        earlier = made_here(self._partial / "work.json") or work
        inside = made_here(self._run / "config.json") or earlier
        if inside.get("started") != earlier.get("started"):  # killed just after the exchange
            self._discard_begun()
        changed = [key for key in _IDENTITY if earlier.get(key) != work[key]]
        notice, begun = "", self._begun()
        if begun and not changed:
            for path in self._run.glob("*"):
                if path.name != "results":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            return earlier, f"going on with {self._partial}, which has {', '.join(begun)}"
        if begun:
            notice = f"{self._partial} had another {' and '.join(changed)}: started again"
        self._discard_begun()
        self._store(self._partial / "work.json", _dumped(work, "work.json"))
        return work, notice

    def _begun(self) -> list[str]:
        """What there is to go on from: the steps, then the scratch files."""
        steps = (file.stem for file in (self._run / "results").glob("*.json"))
        return [*sorted(steps), *sorted(file.name for file in self.scratch.glob("*"))]

    def _discard_begun(self) -> None:
        discard(self._run)
        discard(self.scratch)

    def _store(self, file: Path, content: bytes) -> None:
        """Write a file whole or not at all; it is on the disk when this returns."""
        with one_line("write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with (self._partial / "new").open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            (self._partial / "new").replace(file)
            sync(file.parent)

    def _config(self, files: list[str]) -> dict:
        """What config.json says; seconds are those of finished steps and of this process."""
        packages = {package: _version(package) for package in _PACKAGES}
        return {
            **self._work,
            "seconds": round(self._earlier + time.monotonic() - self._began, 3),
            "seconds_of_steps": self._work["seconds"],
            "versions": {"python": platform.python_version(), **packages},
            "platform": platform.platform(),
            "files": files,
        }

    def _release(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for children that were forked with it
            os.close(self._lock)
            self._lock = None


def _work(command: str, config: dict) -> dict:
    """What work.json says when a work begins."""
    work = {
        "made_by": MADE_BY,
        "command": command,
        "config": config,
        "version": _version("vlm-circuits"),
        "commit": _commit(),
        "code": _code(),
        "started": datetime.now(UTC).isoformat(),
        "seconds": {},
    }
    return json.loads(_dumped(work, "the configuration"))


@cache
def _commit() -> str | None:
    """The commit of a checkout that this file belongs to, with `-dirty` when files were changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        for command in (tracked, describe):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def _code() -> str:
    """A checksum of all our source files: results of other code are not gone on with."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted([*root.glob("interp/**/*.py"), *root.glob("circuits/**/*.py")]):
        found.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return found.hexdigest()


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _dumped(content: object, what: str, indent: int | None = None) -> bytes:
    try:
        return (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from error


def _result(content: bytes) -> Result:
    """A saved result; KeyError, TypeError or ValueError when it is none."""
    saved = json.loads(content)
    if not isinstance(saved["metrics"], dict) or not isinstance(saved["data"], dict):
        raise TypeError("a result has metrics and data")
    return Result(saved["metrics"], saved["data"])
