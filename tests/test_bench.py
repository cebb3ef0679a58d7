"""The benchmarks measure nothing where results differ, and say what they measured."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformer_lens.hook_points import HookPoint

from circuits.counting.presets import PRESETS
from interp.toy import ToyVLM
from tests.bench import run, toy
from tests.bench.figures import AT_LEAST, AT_MOST, Figure, Size, race

TINY = Size(rounds=1, steps=1, per_count=1, preset="tiny")
PRESET = PRESETS["tiny"]

KEYS = {
    "toy.hooks_overhead",
    "toy.hooks_overhead.text",
    "toy.hooks_overhead.vision",
    "toy.train.text",
    "toy.train.vision",
    "toy.train.truth.text",
    "toy.train.truth.vision",
    "toy.answers.text",
    "toy.answers.vision",
    "toy.evaluate",
    "toy.evaluate.wall",
}


def changed(model: ToyVLM, by: float) -> ToyVLM:
    """With the decoder's last biases moved: an error that no shape shows."""
    with torch.no_grad():
        model.raw.unembed.b_U += by * torch.arange(model.raw.b_U.numel())
    return model


@pytest.fixture(scope="module")
def model() -> ToyVLM:
    return toy.model_of(PRESET)


def test_the_file_is_json_with_every_figure_and_the_machine(tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    found = run.measure(list(run.BENCHMARKS), TINY, name="test", out=out)
    written = json.loads(out.read_text(), parse_constant=pytest.fail)
    facts = written.pop("machine")
    assert {"cpu", "torch", "threads", "date", "size"} <= set(facts)
    assert facts["threads"] == 1 and facts["torch"] == torch.__version__
    assert set(written) == set(found) == KEYS
    for key, entry in written.items():
        assert {"value", "unit", "limit", "bound", "ok", "what", "against", "timings"} == set(entry)
        assert entry["value"] > 0, key
        assert all(t > 0 for times in entry["timings"].values() for t in times), key
        assert (entry["ok"] is None) == (entry["limit"] is None), key
    limits = {key: entry["limit"] for key, entry in written.items() if entry["limit"]}
    assert limits == {
        "toy.hooks_overhead": 1.05,
        "toy.hooks_overhead.text": 1.05,
        "toy.hooks_overhead.vision": 1.05,
        "toy.answers.vision": 1.6,
        "toy.answers.text": 3.0,
        "toy.evaluate": 300.0,
    }
    table = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in table if line.startswith("toy.")} >= KEYS


def test_the_overhead_is_the_larger_of_its_two_parts():
    found = dict(toy.hooks_overhead(TINY))
    parts = [found[f"toy.hooks_overhead.{modality}"].value for modality in ("vision", "text")]
    assert found["toy.hooks_overhead"].value == max(parts)


def test_the_model_without_hooks_has_no_hook_point_left_and_the_same_weights(model):
    kinds = Counter(type(m) for m in model.raw.modules())
    plain = toy.without_hooks(toy.model_of(PRESET)).raw
    assert kinds[HookPoint] > 100
    assert Counter(type(m) for m in plain.modules()) == kinds - Counter({HookPoint: 1000})
    assert all(torch.equal(plain.state_dict()[k], v) for k, v in model.raw.state_dict().items())


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_no_overhead_is_given_where_one_weight_differs(modality):
    hooked, plain = toy.model_of(PRESET), toy.without_hooks(toy.model_of(PRESET))
    lesson = toy.lesson_of(hooked, PRESET, modality, 2)
    assert toy.race_of_steps(hooked, plain, lesson, rounds=1).slowdown is not None
    with torch.no_grad():
        plain.raw.blocks[0].attn.W_V[0, 0, 0] += 1e-3
    assert toy.race_of_steps(hooked, plain, lesson, rounds=1).slowdown is None


def test_no_overhead_is_given_where_only_a_gradient_differs():
    hooked, plain = toy.model_of(PRESET), toy.without_hooks(toy.model_of(PRESET))
    lesson = toy.lesson_of(hooked, PRESET, "text", 2)
    plain.raw.requires_grad_(True).W_E.register_hook(lambda grad: grad * 1.0001)
    assert toy.race_of_steps(hooked, plain, lesson, rounds=1).slowdown is None


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_no_speed_of_answers_is_given_where_a_token_differs(model, modality):
    batch = toy.lesson_of(model, PRESET, modality, 2).batch
    assert toy.race_of_answers(model, toy.reread, batch, rounds=1).speedup is not None
    other = changed(toy.model_of(PRESET), by=10.0)
    wrong = toy.race_of_answers(model, lambda _, b: toy.reread(other, b), batch, rounds=1)
    assert wrong.speedup is None and wrong.ours == []


def test_the_loop_that_rereads_gives_the_tokens_of_whole_forwards(model):
    batch = toy.lesson_of(model, PRESET, "vision", 2).batch
    tokens = toy.reread(model, batch)
    logits = model.run(batch.extend(tokens[:, :-1])).logits
    assert torch.equal(logits.argmax(-1), tokens)


def test_the_two_ways_take_turns_and_the_least_time_of_each_counts():
    calls = []
    one = race(
        lambda: calls.append("ours"), lambda: calls.append("other"), same=lambda *_: True, rounds=2
    )
    assert calls == ["ours", "other", "other", "ours", "ours", "other"]
    timed = one._replace(ours=[3.0, 2.0], other=[9.0, 8.0])
    assert timed.speedup == 4.0 and timed.slowdown == 0.25


FIGURE = Figure(2.0, "x", "a ratio", {"ours": [1.0]})


@pytest.mark.parametrize(
    ("change", "ok", "verdict", "code"),
    [
        ({}, None, "", 0),
        ({"limit": 2.0, "bound": AT_MOST}, True, "met", 0),
        ({"limit": 2.0, "bound": AT_LEAST}, True, "met", 0),
        ({"limit": 1.9, "bound": AT_MOST}, False, "MISSED", 0),
        ({"limit": 2.1, "bound": AT_LEAST}, False, "MISSED", 0),
        ({"value": None}, False, "UNEQUAL", 1),
        ({"value": None, "limit": 2.1, "bound": AT_MOST}, False, "UNEQUAL", 1),
    ],
)
def test_only_unequal_results_fail_the_command(change, ok, verdict, code):
    figure = replace(FIGURE, **change)
    assert (figure.ok, figure.verdict) == (ok, verdict)
    assert run.exit_code({"a": FIGURE, "b": figure}) == code
    assert len(run.complaints({"a": FIGURE, "b": figure})) == (ok is False)
    assert figure.as_json()["ok"] is ok and json.dumps(figure.as_json(), allow_nan=False)


def test_a_place_that_cannot_be_a_file_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "bench.json"):
        with pytest.raises(SystemExit) as stopped:
            run.main(["toy.train", "--out", str(place)])
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and "cannot be a file" in captured.err
        assert captured.out == ""


@pytest.mark.parametrize("arguments", [["toy.nothing"], ["--size", "huge"]])
def test_what_is_not_known_is_refused_with_the_choices(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2 and "there are" in capsys.readouterr().err
