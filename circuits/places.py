"""How does a folder take its place, so that nobody ever sees it half made?

`RUN` is worked on in `RUN.partial`, which is locked, and which a process may leave at any moment:

    work.json   what is being made
    lock        held by the process that works, and names it
    run/        what will become `RUN`
    scratch/    checkpoints and the like, to go on from; no part of `RUN`
    new         a file that is being written, before it gets its name
    replaced    the old `RUN`, for a moment, where the system cannot exchange two folders
    discarded   what is being deleted
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from interp.errors import InputError

MADE_BY = "vlm-circuits run"
_WORK = {"work.json", "lock", "run", "scratch", "new", "replaced", "discarded"}


def partial_of(place: Path) -> Path:
    """Where the work on a run lies: beside it, so that a rename suffices."""
    return place.with_name(f"{place.name}.partial")


def resolved(path: str | Path) -> Path:
    """An absolute path without `~`, `..` and symbolic links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{str(path)!r} is no place for a run: {error}") from error


@contextmanager
def one_line(verb: str, path: Path) -> Iterator[None]:
    """Turn what the system refuses into one line with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot {verb} {path}: {error.strerror or error}") from error


def check_place(place: Path) -> None:
    """Refuse a place where something would be lost: accept none, an empty folder, or a run."""
    if place in (Path(place.root), Path(os.path.expanduser("~")).resolve()):
        raise InputError(f"a run cannot take the place of {place}: name a folder inside it")
    if place.name.endswith(".partial"):
        raise InputError(f"{place}: .partial is for unfinished runs, take another name")
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError(f"{place} is a file: a run is a folder, take another name")
    config = made_here(place / "config.json")
    foreign = _foreign(place, config.get("files", [])) if config else set(os.listdir(place))
    if foreign:
        what = "files that are not of its run" if config else "something that is not a run"
        raise InputError(f"{place} holds {what} ({_some(foreign)}): take another folder")
    if place.is_mount() or (not config and place == Path.cwd()):
        raise InputError(f"{place} itself cannot be replaced: name a folder inside it")


def check_partial(partial: Path) -> None:
    """Refuse a folder for the work that someone else made."""
    if partial.is_dir():
        held = set(os.listdir(partial))
        ours = _WORK if made_here(partial / "work.json") else {"lock", "new"}
        # another process may be clearing it up just now: what is gone is nobody's
        foreign = {name for name in held - ours if os.path.lexists(partial / name)}
        if foreign:
            raise InputError(f"{partial} holds something else ({_some(foreign)}): move it away")
    elif partial.is_file() or partial.is_symlink():
        raise InputError(f"{partial} is no folder, where unfinished work would lie: move it away")


def free(path: str | Path) -> Path:
    """The absolute path of a place that a run may take.

    Raises:
        InputError: something would be lost there, or it cannot be looked at.
    """
    place = resolved(path)
    with one_line("write", place):
        check_place(place)
        check_partial(partial_of(place))
    return place


def made_here(file: Path) -> dict | None:
    """The content of a config.json or work.json that we wrote; None for anything else."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        if isinstance(content, dict) and content.get("made_by") == MADE_BY:
            return content
    return None


def contents(folder: Path) -> set[str]:
    """All files below, and the folders that hold nothing."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    }


def _foreign(folder: Path, files: Iterable[str]) -> set[str]:
    ours = {str(part) for name in files for part in (name, *PurePosixPath(name).parents)}
    return contents(folder) - ours - {"config.json"}


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def make(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it, noting each."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with suppress(FileExistsError):  # another process was faster
            missing.mkdir()
            made.append(missing)


def remove_empty(made: list[Path]) -> None:
    """Remove folders that were made, innermost first, and leave those that hold something."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()


def locked(partial: Path) -> int:
    """A descriptor that holds the lock of the work; its process is named to whoever comes next."""
    file = partial / "lock"
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 20, 0).decode() or "another one"
            os.close(lock)
            raise InputError(f"process {holder} is working on {partial}: let it end") from error
        except OSError:  # a disk without locks
            os.close(lock)
            file.unlink()
            raise
        if file.exists() and os.path.samestat(os.fstat(lock), file.stat()):
            with suppress(OSError):  # a full disk: then it goes without a name
                os.truncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
            return lock
        os.close(lock)  # its last holder deleted the file meanwhile


def restore(replaced: Path, place: Path) -> None:
    """Undo the first of two renames, where a process was killed between them."""
    if replaced.exists() and not place.exists():
        replaced.rename(place)
    discard(replaced)


def discard(folder: Path) -> None:
    """Delete a folder of the work, so that a half deleted one never bears its name."""
    rubbish = folder.with_name("discarded")
    if rubbish.exists():
        shutil.rmtree(rubbish)
    if folder.exists():
        folder.rename(rubbish)
        shutil.rmtree(rubbish)


def remove_work(partial: Path) -> None:
    """Delete the work, all but an old run that waits to be restored."""
    discard(partial / "run")
    discard(partial / "scratch")
    for name in ("new", "work.json", "lock"):  # the lock last: until then nobody else comes in
        (partial / name).unlink(missing_ok=True)
    partial.rmdir()


def put(new: Path, place: Path, aside: Path) -> None:
    """Give `new` the name `place`; an old run there ends at `new` or, without exchange, `aside`."""
    if not made_here(place / "config.json"):
        new.rename(place)  # missing, or an empty folder
    elif not _exchange(new, place):
        place.rename(aside)
        try:
            new.rename(place)
        except BaseException:
            aside.rename(place)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; false where the system cannot (not Linux, some disks)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code))


def sync(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def put_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, with the folders above it.

    Raises:
        InputError: it cannot be written; what was there is as it was.
    """
    with one_line("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with new.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
