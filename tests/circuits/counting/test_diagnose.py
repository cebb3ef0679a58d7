"""The main job: a run folder from a model, whole or not at all, and the command line around it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from circuits.__main__ import main
from circuits.counting import attractors, behaviour, commands, comparison, diagnose
from circuits.counting.examples import make_examples, save_examples
from circuits.counting.measurements import MODULES, measurement
from circuits.counting.subject import Setting, Subject
from circuits.counting.verdict import STAGES
from interp.errors import InputError

FEW = ["--per-count", "4"]


def _counting(*arguments: object) -> int:
    return main(["counting", *map(str, arguments)])


@pytest.fixture
def run_folder(model_folder, tmp_path) -> Path:
    assert _counting("diagnose", "--model", model_folder, "--out", tmp_path / "run", *FEW) == 0
    return tmp_path / "run"


def test_a_diagnosis_leaves_metrics_figures_and_a_report(run_folder):
    metrics = json.loads((run_folder / "metrics.json").read_text())
    for regime in ("id", "ve", "fe"):
        for key in ("accuracy.vision", "accuracy.text", "no_number.vision", "vision_gap",
                    "language_gap", "probe.trained.exact", "probe.untrained.exact"):  # fmt: skip
            interval = [metrics[f"{key}.{regime}{end}"] for end in (".low", "", ".high")]
            assert interval == sorted(interval) and metrics[f"{key}.{regime}.n"] > 0
        assert f"accuracy.vision.{regime}.digits" in metrics
        assert 0 <= metrics[f"comparison.vision.{regime}.distance_1"] <= 1
    for stage in STAGES:
        assert metrics[f"verdict.{stage}"] in ("excluded", "supported", "undecided")
    assert {p.stem for p in (run_folder / "figures").iterdir()} == {f"{n}_seed_4" for n in MODULES}
    page = (run_folder / "report.html").read_text()
    assert page.count("data:image/png;base64") == len(MODULES)
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert not run_folder.with_name("run.partial").exists()


def test_a_diagnosis_prints_what_it_does_and_its_tables(model_folder, tmp_path, capsys):
    _counting("diagnose", "--model", model_folder, "--out", tmp_path / "run", *FEW)
    said = capsys.readouterr().out
    assert "seed 4: comparison" in said
    assert "Where does visual counting break?" in said and "Is the break here?" in said


def test_tables_and_figures_are_made_again_from_the_folder_alone(run_folder):
    from circuits.runs import read_run

    first, *_ = diagnose.tables(run_folder)
    assert first.rows[0][0].startswith("pictures: right answers")
    for name, result in read_run(run_folder).results.items():
        module = measurement(name.split(".", 1)[1])
        assert module.figure(result).axes
        assert module.table(result).columns


def test_the_same_configuration_gives_the_same_metrics(run_folder, model_folder, tmp_path):
    _counting("diagnose", "--model", model_folder, "--out", tmp_path / "again", *FEW)
    assert (run_folder / "metrics.json").read_bytes() == (
        tmp_path / "again" / "metrics.json"
    ).read_bytes()


def test_all_seeds_prefix_their_metrics(model_folder, tmp_path):
    config = diagnose.Config(
        model=str(model_folder), per_count=4, out=tmp_path / "run", all_seeds=True
    )
    metrics = json.loads((diagnose.run(config) / "metrics.json").read_text())
    assert all(key.startswith("seed_4.") for key in metrics)
    assert "seed_4.verdict.mapping" in metrics


def test_records_made_by_others_are_measured_and_empty_regimes_are_absent(
    model_folder, small_world, tmp_path
):
    examples = make_examples(small_world, per_count=4, seed=9)
    save_examples(examples.select(examples.counts <= 6), tmp_path / "records.jsonl")
    config = diagnose.Config(
        model=str(model_folder), data=tmp_path / "records.jsonl", out=tmp_path / "run"
    )
    metrics = json.loads((diagnose.run(config) / "metrics.json").read_text())
    assert metrics["accuracy.vision.id.n"] == 16 and metrics["accuracy.vision.ve.n"] == 12
    assert not [key for key in metrics if "fe" in key.split(".")]


def test_only_one_regime_is_enough(model_folder, small_world, tmp_path):
    examples = make_examples(small_world, per_count=2, seed=9)
    for name, own in (
        ("ve", (examples.counts > 3) & (examples.counts < 7)),
        ("one", np.array([0])),
    ):
        save_examples(examples.select(own), tmp_path / "records.jsonl")
        config = diagnose.Config(
            model=str(model_folder), data=tmp_path / "records.jsonl", out=tmp_path / name
        )
        assert (diagnose.run(config) / "report.html").exists()


def test_a_run_that_is_cut_short_goes_on_where_it_stood(model_folder, tmp_path, monkeypatch):
    config = diagnose.Config(model=str(model_folder), per_count=4, out=tmp_path / "run")
    module = measurement("masking")
    whole = module.run

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        diagnose.run(config)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(module, "run", whole)
    for name in ("accuracy", "attractors", "hidden-number"):
        monkeypatch.setattr(measurement(name), "run", cut)
    assert (diagnose.run(config) / "metrics.json").exists()


@pytest.mark.parametrize("name", list(MODULES))
def test_every_measurement_runs_from_the_command_line(name, model_folder, tmp_path, capsys):
    assert _counting(name, "--model", model_folder, *FEW, "--out", tmp_path / "run") == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics and (tmp_path / "run" / "figures" / f"{name}.png").exists()
    assert len(capsys.readouterr().out.splitlines()) > 4
    assert _counting(name, "--model", model_folder, *FEW) == 0


def _refused(capsys, *arguments: object) -> str:
    """The one line with which a command refuses."""
    assert _counting(*arguments) == 2
    captured = capsys.readouterr()
    line = captured.err.strip()
    assert line.startswith("error: ") and "\n" not in line and "Traceback" not in line
    return line


def test_bad_input_is_one_line_and_leaves_nothing_behind(model_folder, tmp_path, capsys):
    out = tmp_path / "new" / "run"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"num_black": 1}\n')
    model = ("--model", model_folder)
    asked = {
        "no preset and no folder 'huge'": ("diagnose", "--model", "huge"),
        "tiny ships no seed 9": ("diagnose", "--weights-seed", "9"),
        "line 1": ("diagnose", *model, "--data", broken),
        "cannot read the records": ("diagnose", *model, "--data", tmp_path / "missing.jsonl"),
        "device 'warp'": ("diagnose", *model, "--device", "warp"),
        "device 'meta'": ("accuracy", *model, "--device", "meta"),
        "per_count 4 is for fresh examples": (
            "accuracy",
            *model,
            "--data",
            broken,
            "--per-count",
            "4",
        ),
        "per_count is 0": ("diagnose", *model, "--per-count", "0"),
        "exclude each other": ("diagnose", *model, "--all-seeds", "--weights-seed", "4"),
        "50,000,000,000": ("diagnose", *model, "--per-count", "5000000000"),
        "no preset 'huge'": ("train", "--model", "huge"),
        "seed is -1": ("train", "--seed", "-1"),
        f"seed is {2**64}": ("train", "--seed", 2**64),
        "top is -1": ("attractors", *model, "--top", "-1"),
        "at most 15 apart": ("comparison", *model, "--distances", "500"),
        "most is 0": ("masking", *model, "--most", "0"),
        "it needs two, one and one": ("hidden-number", *model, "--probe-boards", "1"),
    }
    for match, arguments in asked.items():
        assert match in _refused(capsys, *arguments, "--out", out)
        assert not out.parent.exists(), arguments
    assert "no command 'diagnoze'" in _refused(capsys, "diagnoze")


def test_a_place_with_brackets_is_printed_as_it_is(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # [/x] would end a style of the terminal's own
    for command in ("diagnose", "paper"):
        models = "--model" if command == "diagnose" else "--models"
        out = f"{command} [/x] [a]"
        assert _counting(command, models, model_folder, "--per-count", 2, "--out", out) == 0
        assert out in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("place", ["file", "file/run", "full", "/proc/run"])
def test_an_output_that_cannot_be_used_is_refused_and_untouched(
    place, model_folder, tmp_path, capsys
):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    _refused(capsys, "diagnose", "--model", model_folder, *FEW, "--out", tmp_path / place)
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert not list(tmp_path.glob("*.partial"))


def test_unknown_options_and_words_exit_with_code_two(model_folder):
    command = [sys.executable, "-m", "circuits", "counting", "diagnose"]
    for wrong in (["--moddel", "tiny"], ["--per-count", "many"]):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_long_task_says_again_how_far_it_is(capsys, monkeypatch):
    for quiet, lines in ((0.0, ["0 %", "40 %", "80 %"]), (1e9, ["0 %", "80 %"])):
        monkeypatch.setattr(commands, "_QUIET", quiet)
        told = commands._Lines()
        for what, share in (("number model", 0.0), ("number model", 0.4), ("truth model", 0.8)):
            told(what, share)
        printed = capsys.readouterr().out.splitlines()
        assert [" ".join(line.split()[2:4]) for line in printed] == lines


def test_an_unknown_study_and_help_say_what_there_is(capsys):
    assert main(["poetry"]) == 2
    assert "no study 'poetry'; there are counting" in capsys.readouterr().err
    assert main([]) == 0 and "counting" in capsys.readouterr().out
    assert _counting("--help") == 0
    assert "diagnose" in capsys.readouterr().out


def test_the_shipped_records_are_measured_with_the_shipped_models(shared_data, tmp_path):
    records = shared_data / "counting" / "testing_data_8x8_0_to_49.jsonl"
    config = diagnose.Config(data=records, out=tmp_path / "run")
    metrics = json.loads((diagnose.run(config) / "metrics.json").read_text())
    n = {regime: metrics[f"accuracy.vision.{regime}.n"] for regime in ("id", "ve", "fe")}
    assert n == {"id": 80, "ve": 80, "fe": 40}
    assert metrics["accuracy.vision.id"] >= 0.95 and metrics["accuracy.text.ve"] >= 0.95
    assert metrics["accuracy.vision.ve"] <= 0.3
    assert metrics["probe.trained.exact.ve"] >= 0.9 and metrics["vision_gap.ve"] <= 0.1
    assert metrics["verdict.individuation"] == "excluded"


def test_the_home_folder_is_no_run_folder(model_folder):
    with pytest.raises(InputError, match="cannot take the place"):
        diagnose.run(diagnose.Config(model=str(model_folder), per_count=4, out=Path.home()))


@pytest.mark.parametrize(("name", "regimes"), [("", {"id", "ve"}), ("_ood", {"fe"})])
def test_published_records_of_19x19_are_measured_in_the_regimes_that_they_have(
    shared_data, name, regimes
):
    records = shared_data / "counting" / f"testing_data_formal{name}.jsonl"
    subject = Subject.load(Setting("paper", data=records))
    assert set(subject.regimes) == regimes
    metrics = {
        key: value
        for module in (behaviour, attractors, comparison)
        for key, value in module.run(module.Config(), subject).metrics.items()
    }
    named = {part for key in metrics for part in key.split(".") if part in ("id", "ve", "fe")}
    assert named == regimes
    for regime in regimes:
        right = {"vision": {"id": 1.0}, "text": {"id": 1.0, "ve": 1.0}}
        for modality in ("vision", "text"):
            expected = right[modality].get(regime, 0.0)
            assert metrics[f"accuracy.{modality}.{regime}"] == pytest.approx(expected, abs=0.05)
        assert metrics[f"accuracy.vision.{regime}.n"] == len(subject.examples) / len(regimes)
