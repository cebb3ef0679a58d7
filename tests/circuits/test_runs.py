"""A run's folder appears whole or not at all, whatever happens to the process that makes it."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import circuits
from circuits import places
from circuits.runs import MADE_BY, Result, RunFolder, interval_metrics, is_done, read_run
from interp.errors import InputError
from interp.stats import wilson

ROOT = Path(circuits.__file__).parents[1]
FOUND = Result({"accuracy": 0.1 + 0.2, "n": 3, "verdict": "excluded"}, {"rows": [[1, 2.5, None]]})


def begin(path, seed=0, command="demo"):
    return RunFolder.open(path, command=command, config={"seed": seed})


def complete(path, seed=0):
    """Make a complete run."""
    with begin(path, seed) as run:
        run.step("look", lambda: FOUND)
        run.write("figures/a.txt", f"seed {seed}")
        run.finish({"seed": seed})
    return Path(path)


def fail() -> Result:
    raise AssertionError("a finished step was computed again")


def listing(folder):
    """Every path below a folder, with the content of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def program(body, *arguments):
    """Start Python in a process of its own."""
    command = [sys.executable, "-c", body, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


# what a run holds


def test_a_run_is_done_for_its_configuration_while_all_its_files_are_there(tmp_path):
    run = complete(tmp_path / "run", seed=3)
    assert is_done(run, command="demo", config={"seed": 3})
    assert not is_done(run, command="demo", config={"seed": 4})
    assert not is_done(run, command="other", config={"seed": 3})
    assert not is_done(tmp_path / "none", command="demo", config={"seed": 3})
    (run / "figures" / "a.txt").unlink()
    assert not is_done(run, command="demo", config={"seed": 3})


def test_a_run_holds_its_metrics_its_configuration_and_its_steps(tmp_path):
    with begin(tmp_path / "deep" / "run", seed=7) as run:
        found = run.step("look", lambda: FOUND)
        run.write("report.html", "<p>é</p>")
        run.write("notes/a.bin", b"\x00\xff")
        run.finish({"z": 1, "a": 0.1})
    saved = read_run(tmp_path / "deep" / "run")
    assert saved.results == {"look": FOUND} and found == FOUND
    assert list(saved.metrics.items()) == [("z", 1), ("a", 0.1)]
    assert saved.config["made_by"] == MADE_BY
    assert (saved.config["command"], saved.config["config"]) == ("demo", {"seed": 7})
    assert saved.config["versions"]["numpy"] == np.__version__
    assert saved.config["seconds"] >= 0 and list(saved.config["seconds_of_steps"]) == ["look"]
    assert (tmp_path / "deep/run/report.html").read_text("utf-8") == "<p>é</p>"
    files = {name for name, content in listing(run.path).items() if content is not None}
    assert files == {*saved.config["files"], "config.json"}
    assert os.listdir(tmp_path / "deep") == ["run"]


def test_equal_runs_are_equal_files_but_for_the_clock(tmp_path):
    one, other = listing(complete(tmp_path / "one")), listing(complete(tmp_path / "other"))
    del one["config.json"], other["config.json"]
    assert one == other


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(data=st.dictionaries(st.text(), json_values, max_size=4))
def test_a_saved_step_comes_back_as_it_was(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("run") / "run"
    with begin(place) as run:
        first = run.step("look", lambda: Result({}, data))
    with begin(place) as run:
        again = run.step("look", fail)
    assert first.data == again.data == data


def test_a_step_is_the_same_before_and_after_it_was_saved(tmp_path):
    with begin(tmp_path / "run") as run:
        first = run.step("look", lambda: Result({}, {"pair": (1, 2), "by": {3: 4}}))
    assert first.data == {"pair": [1, 2], "by": {"3": 4}}


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.int64(1), {1}])
def test_what_json_cannot_hold_is_refused_with_its_step(tmp_path, bad):
    with begin(tmp_path / "run") as run:
        with pytest.raises(InputError, match="the result of look cannot be written as JSON"):
            run.step("look", lambda: Result({}, {"bad": bad}))
        run.step("other", lambda: FOUND)
        with pytest.raises(InputError, match="metrics cannot be written as JSON"):
            run.finish({"bad": float("nan")})
    assert os.listdir(tmp_path) == ["run.partial"]
    with pytest.raises(InputError, match="configuration cannot be written as JSON"):
        RunFolder.open(tmp_path / "x", command="demo", config={"bad": bad})
    assert os.listdir(tmp_path) == ["run.partial"]


def test_an_interval_becomes_four_flat_metrics():
    metrics = interval_metrics("accuracy.text.id", wilson(10, 20))
    assert list(metrics) == [f"accuracy.text.id{end}" for end in ("", ".low", ".high", ".n")]
    assert list(metrics.values()) == list(wilson(10, 20))
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_a_figure_is_saved_the_same_each_time_and_given_back(tmp_path):
    def draw():
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2])
        return figure

    with begin(tmp_path / "run") as run:
        first, second = run.figure("a", draw()), run.figure("b", draw())
        run.finish({})
    assert first == second == (tmp_path / "run/figures/a.png").read_bytes()
    width, height = (int.from_bytes(first[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (300, 150)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "config.json", "results/x", ".", ""])
def test_files_outside_the_run_or_on_its_own_are_refused(tmp_path, name):
    with begin(tmp_path / "run") as run, pytest.raises(InputError, match="no place for a file"):
        run.write(name, "x")


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", "a b"])
def test_steps_are_named_like_files(tmp_path, name):
    with begin(tmp_path / "run") as run, pytest.raises(InputError, match="no file can be named"):
        run.step(name, lambda: FOUND)


# reading


def test_what_is_not_a_run_is_not_read(tmp_path):
    with pytest.raises(InputError, match="no complete run"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"made_by": "somebody"}')
    with pytest.raises(InputError, match="no complete run"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["metrics.json", "results/look.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_run_with_a_damaged_file_is_not_read(tmp_path, name, damage):
    file = complete(tmp_path / "run") / name
    file.write_bytes(file.read_bytes()[:-9]) if damage == "truncate" else file.unlink()
    with pytest.raises(InputError, match="broken file|No such file"):
        read_run(tmp_path / "run")


# the place


def test_nothing_lies_in_the_place_between_steps(tmp_path):
    place = tmp_path / "run"

    def look() -> Result:
        assert not place.exists()
        return FOUND

    with begin(place) as run:
        for name in ("a", "b", "c"):
            run.step(name, look)
            run.write(f"{name}.txt", name)
            assert not place.exists()
        run.finish({})
    assert read_run(place).results == dict.fromkeys("abc", FOUND)


def test_a_complete_run_is_replaced_and_untouched_until_then(tmp_path):
    place = complete(tmp_path / "run", seed=1)
    with begin(place, seed=2) as run:
        assert not run.resumed and run.notice == ""
        run.step("look", lambda: FOUND)
        run.write("other.txt", "new")
        assert read_run(place).metrics == {"seed": 1}
        run.finish({"seed": 2})
    assert read_run(place).metrics == {"seed": 2}
    assert not (place / "figures").exists() and (place / "other.txt").exists()
    assert os.listdir(tmp_path) == ["run"]


def test_whoever_looks_during_a_replacement_sees_a_whole_run(tmp_path):
    place = complete(tmp_path / "run")
    files, torn, looks, done = [*listing(place)], [], [0], threading.Event()

    def look():
        while not done.is_set():
            torn.extend(name for name in files if not (place / name).exists())
            looks[0] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    for seed in range(20):
        complete(place, seed)
    done.set()
    watcher.join()
    assert looks[0] > 20 and torn == []


@pytest.mark.parametrize("spelling", ["run", "run/", "./run", "sub/../run", "link"])
def test_one_place_has_many_spellings(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    complete(spelling, seed=1)
    complete(spelling, seed=2)
    assert read_run(tmp_path / "run").metrics == {"seed": 2}
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "run", "sub"]


def test_the_home_folder_is_expanded_and_itself_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    complete("~/run")
    assert read_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="name a folder inside it"):
        begin("~")


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    assert read_run(complete(tmp_path / "run"))


def test_a_run_in_which_one_stands_can_be_replaced_and_an_empty_folder_not(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(InputError, match="name a folder inside it"):
        begin(".")
    place = complete(tmp_path / "run", seed=1)
    monkeypatch.chdir(place)
    complete(".", seed=2)
    assert read_run(place).metrics == {"seed": 2}


def test_a_place_that_holds_something_else_is_refused_by_name(tmp_path):
    place = tmp_path / "thesis"
    place.mkdir()
    for name in ("d.tex", "a.tex", "c.tex", "b.tex"):
        (place / name).write_text(name)
    before = listing(tmp_path)
    with pytest.raises(InputError, match=r"a\.tex, b\.tex, c\.tex and 1 more"):
        begin(place)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", "figures/mine.png", "empty"])
def test_files_that_were_put_into_a_run_are_not_lost(tmp_path, name):
    place = complete(tmp_path / "run")
    (place / name).mkdir() if name == "empty" else (place / name).write_text("mine")
    with pytest.raises(InputError, match=f"not of its run.*{name}"):
        begin(place)
    assert (place / name).exists() and os.listdir(tmp_path) == ["run"]


def test_a_run_from_which_files_were_deleted_can_be_replaced(tmp_path):
    place = complete(tmp_path / "run")
    (place / "figures/a.txt").unlink()
    assert read_run(complete(place, seed=5)).metrics == {"seed": 5}


def test_what_comes_to_lie_in_the_place_during_the_work_is_not_lost(tmp_path):
    place = tmp_path / "run"
    with pytest.raises(InputError, match="mine"), begin(place) as run:
        run.step("look", lambda: FOUND)
        place.mkdir()
        (place / "mine").write_text("x")
        run.finish({})
    assert (place / "mine").read_text() == "x"
    (place / "mine").unlink()
    with begin(place) as run:
        run.step("look", fail)
        run.finish({"late": 1})
    assert read_run(place).metrics == {"late": 1}


@pytest.mark.parametrize("path", ["/", "/proc/nope", "\0", "~nobody-of-that-name/run", "x" * 300])
def test_places_that_cannot_be_written_are_refused_in_one_line(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        begin(path)
    assert "\n" not in str(caught.value) and path[:20].strip("\0") in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is a file"):
        begin(tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot write .*/file/deep/run: Not a directory"):
        begin(tmp_path / "file" / "deep" / "run")
    (tmp_path / "run.partial").write_text("x")
    with pytest.raises(InputError, match=r"run\.partial is no folder"):
        begin(tmp_path / "run")
    with pytest.raises(InputError, match=r"\.partial is for unfinished runs"):
        begin(tmp_path / "a.partial")
    assert sorted(os.listdir(tmp_path)) == ["file", "run.partial"]


@contextmanager
def disk_with(n_bytes):
    """No file may grow beyond this size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_run_and_the_finished_steps(tmp_path):
    place = complete(tmp_path / "run", seed=1)
    big = Result({}, {"rows": list(range(5000))})
    with begin(place, seed=2) as run:
        run.step("small", lambda: FOUND)
        with disk_with(4096), pytest.raises(InputError, match=r"cannot write .*File too large"):
            run.step("big", lambda: big)
    assert read_run(place).metrics == {"seed": 1}
    with begin(place, seed=2) as run:
        assert run.step("small", fail) == FOUND
        assert run.step("big", lambda: big) == big
        run.finish({"seed": 2})
    assert list(read_run(place).results) == ["big", "small"]


def test_a_full_disk_at_the_start_leaves_nothing(tmp_path):
    with disk_with(0), pytest.raises(InputError, match="File too large"):
        begin(tmp_path / "new" / "run")
    assert os.listdir(tmp_path) == []


# unfinished work


def test_an_error_before_the_first_step_leaves_nothing(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(KeyError), begin(tmp_path / "kept" / "new" / "run") as run:
        run.write("started.txt", "x")
        raise KeyError
    assert listing(tmp_path) == {"kept": None}


def test_finished_steps_are_not_computed_again(tmp_path):
    with pytest.raises(KeyError), begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
        run.write("stale.txt", "of the first try")
        raise KeyError
    assert os.listdir(tmp_path) == ["run.partial"]
    with begin(tmp_path / "run") as run:
        assert run.resumed and "has a" in run.notice
        assert run.step("a", fail) == FOUND
        run.step("b", lambda: FOUND)
        run.finish({})
    assert set(listing(run.path)) == {
        "config.json",
        "metrics.json",
        "results",
        "results/a.json",
        "results/b.json",
    }
    assert set(read_run(run.path).config["seconds_of_steps"]) == {"a", "b"}


def test_scratch_files_are_there_for_the_next_try_and_no_part_of_the_run(tmp_path):
    with pytest.raises(KeyError), begin(tmp_path / "run") as run:
        run.scratch.mkdir()
        (run.scratch / "model.bin").write_bytes(b"step 7")
        raise KeyError
    assert os.listdir(tmp_path) == ["run.partial"]
    with begin(tmp_path / "run") as run:
        assert run.resumed and "has model.bin" in run.notice
        assert (run.scratch / "model.bin").read_bytes() == b"step 7"
        run.finish({})
    assert read_run(tmp_path / "run").config["files"] == ["metrics.json"]
    assert os.listdir(tmp_path) == ["run"]


def test_scratch_files_of_another_configuration_are_thrown_away(tmp_path):
    with begin(tmp_path / "run") as run:
        run.scratch.mkdir()
        (run.scratch / "model.bin").write_bytes(b"step 7")
    with begin(tmp_path / "run", seed=1) as run:
        assert not run.resumed and "another config" in run.notice
        assert not run.scratch.exists()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("other", [{"seed": 1}, {"command": "another"}])
def test_work_with_another_configuration_starts_again_and_says_so(tmp_path, other):
    with begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
    fresh = Result({"fresh": 1}, {})
    with begin(tmp_path / "run", **other) as run:
        assert not run.resumed
        assert f"another {'config' if 'seed' in other else 'command'}" in run.notice
        assert run.step("a", lambda: fresh) == fresh


def test_work_of_other_code_is_not_gone_on_with(tmp_path):
    with begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
    file = tmp_path / "run.partial" / "work.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "code": "0" * 64}))
    with begin(tmp_path / "run") as run:
        assert not run.resumed and "another code" in run.notice


@pytest.mark.parametrize("content", ["", '{"metrics": {}', "[]", '{"metrics": {}}', "\xff"])
def test_a_broken_saved_step_is_computed_again(tmp_path, content):
    with begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
    (tmp_path / "run.partial/run/results/a.json").write_text(content, "latin-1")
    fresh = Result({"fresh": 1}, {})
    with begin(tmp_path / "run") as run:
        assert run.step("a", lambda: fresh) == run.step("a", fail) == fresh


@pytest.mark.parametrize("name", ["mine.txt", "run", "work.json"])
def test_a_partial_folder_of_someone_else_is_refused(tmp_path, name):
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial" / name).write_text("{}")
    before = listing(tmp_path)
    with pytest.raises(InputError, match=rf"run\.partial holds something else \({name}\)"):
        begin(tmp_path / "run")
    assert listing(tmp_path) == before


def test_a_file_of_someone_else_beside_our_work_is_refused(tmp_path):
    with begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
    (tmp_path / "run.partial" / "mine.txt").write_text("x")
    with pytest.raises(InputError, match=r"mine\.txt"):
        begin(tmp_path / "run", seed=1)


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    with begin(tmp_path / "run") as run:
        run.step("a", lambda: FOUND)
        with pytest.raises(InputError, match=f"process {os.getpid()} is working on"):
            begin(tmp_path / "run")
        assert run.step("a", fail) == FOUND
    with begin(tmp_path / "run") as run:
        assert run.resumed


WAITS = """
import sys, time
from circuits.runs import Result, RunFolder
with RunFolder.open(sys.argv[1], command="demo", config={"seed": 0}) as run:
    run.step("a", lambda: Result({"pid": 1}, {}))
    run.step("b", lambda: print("in b", flush=True) or time.sleep(60))
"""


def test_a_run_killed_in_a_step_goes_on_where_it_stood(tmp_path):
    place = tmp_path / "deep" / "run"
    with program(WAITS, place) as process:
        assert process.stdout.readline() == "in b\n"
        with pytest.raises(InputError, match=f"process {process.pid} is working on"):
            begin(place)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(place.parent) == ["run.partial"]
    with begin(place) as run:
        assert run.resumed
        assert run.step("a", fail).metrics == {"pid": 1}
        run.step("b", lambda: FOUND)
        run.finish({})
    assert os.listdir(place.parent) == ["run"]
    assert list(read_run(place).results) == ["a", "b"]


KILLED_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
from circuits import places
from circuits.runs import Result, RunFolder, read_run

root, mode = Path(sys.argv[1]), sys.argv[2]
place, log = root / "runs" / "run", root / "log"
if mode == "no exchange":  # a system without renameat2
    places._exchange = lambda one, other: False
os.fsync = lambda descriptor: None  # slow, and of use only when the power fails
armed, kill_at, seen = False, 0, 0


def hook(event, arguments):
    global seen
    if armed and (event == "open" or event.startswith(("os.", "shutil.", "fcntl."))):
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def make(seed):
    def compute(name):
        with log.open("a") as stream:
            stream.write(name)
        return Result({}, {"seed": seed})

    with RunFolder.open(place, command="demo", config={"seed": seed}) as run:
        run.scratch.mkdir(exist_ok=True)
        (run.scratch / "checkpoint").write_text(str(seed))
        for name in "ab":
            run.step(name, lambda name=name: compute(name))
            run.write(f"figures/{name}.txt", name)
        run.finish({"seed": seed})


def killed(at):  # whether a process that makes the new run was killed before this call of it
    global armed, kill_at
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), (at, code)
        return code != 0
    armed, kill_at = True, at
    make(1)
    os._exit(0)


def whole(seeds):
    saved = read_run(place)
    assert saved.metrics["seed"] in seeds, saved
    assert saved.results == dict.fromkeys("ab", Result({}, {"seed": saved.metrics["seed"]}))
    assert all((place / name).is_file() for name in saved.config["files"])
    held = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
    assert held == {*saved.config["files"], "config.json"}, held
    return saved.metrics["seed"]


sys.addaudithook(hook)
n, going = 0, True
while going:
    n += 1
    make(0)
    if mode == "missing":
        shutil.rmtree(place)
    going = killed(n)
    in_place = whole({0, 1}) if place.exists() else None
    assert in_place is not None or mode != "exchange", n
    saved = {f.stem for f in (root / "runs/run.partial/run/results").glob("*.json")}
    log.write_text("")
    make(1)
    assert whole({1}) == 1
    assert in_place == 1 or set(log.read_text()) == {"a", "b"} - saved, (n, saved)
    assert os.listdir(place.parent) == ["run"], (n, os.listdir(place.parent))
print(n)
"""


@pytest.mark.parametrize("mode", ["missing", "exchange", "no exchange"])
def test_a_run_can_be_killed_at_every_call_of_the_system(tmp_path, mode):
    with program(KILLED_EVERYWHERE, tmp_path, mode) as process:
        calls = process.stdout.read()
    assert process.returncode == 0
    assert int(calls) > 50


def test_without_exchange_a_failed_replacement_restores_the_old_run(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_exchange", lambda one, other: False)
    place = complete(tmp_path / "run", seed=1)
    with pytest.raises(FileNotFoundError):
        places.put(tmp_path / "missing", place, tmp_path / "aside")
    assert read_run(place).metrics == {"seed": 1}
    assert read_run(complete(place, seed=2)).metrics == {"seed": 2}
    assert os.listdir(tmp_path) == ["run"]


def test_what_is_half_deleted_no_longer_bears_its_name(tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    old = complete(tmp_path / "run")
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(places.shutil, "rmtree", interrupt)
        places.discard(old)
    assert os.listdir(tmp_path) == ["discarded"]
    places.discard(old)
    assert os.listdir(tmp_path) == []
