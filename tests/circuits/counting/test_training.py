"""Training: reproducible, resumable, and the folder it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from circuits.counting import cards, presets, training
from circuits.counting.boards import World, split_of
from circuits.counting.lessons import Epochs, Lessons
from circuits.counting.presets import Preset, Recipe, Stage
from circuits.counting.questions import number_of_c
from interp.errors import InputError
from interp.toy import StackConfig


@pytest.fixture(scope="module")
def small(small_world) -> Preset:
    """Two stages of a dozen steps on 4x4 boards."""
    stages = (Stage(12, 3e-3, 4, ("text",)), Stage(12, 1e-3, 4, ("vision", "text")))
    recipe = Recipe(stages, batch=8)
    stack = StackConfig(n_layers=1, n_heads=2, d_model=16, d_head=8, d_mlp=32)
    recipes = {"number": recipe, "truth": replace(recipe, near=0.5)}
    return Preset("small", small_world, recipes, stack)


@pytest.fixture
def registered(small, monkeypatch) -> Preset:
    monkeypatch.setitem(presets.PRESETS, "small", small)
    return small


def _trained(preset: Preset, task: str = "number", seed: int = 3) -> training.Learner:
    learner = training.Learner(preset, task, seed)
    while not learner.done:
        learner.advance()
    return learner


def _stopped_and_resumed(preset: Preset, task: str, stop: int, kept: Path) -> training.Learner:
    """Trained to a step, kept in a file, and taken up by another learner to the end."""
    first, second = (training.Learner(preset, task, 3) for _ in range(2))
    for _ in range(stop):
        first.advance()
    kept.write_bytes(first.to_bytes())
    assert second.restore(kept)
    while not second.done:
        second.advance()
    return second


def _same(a: training.Learner, b: training.Learner) -> bool:
    one, other = a.model.raw.state_dict(), b.model.raw.state_dict()
    return all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("task", ["number", "truth"])
def test_two_trainings_of_one_seed_give_the_same_weights_and_another_seed_others(small, task):
    assert _same(_trained(small, task), _trained(small, task))
    assert not _same(_trained(small, task), _trained(small, task, seed=4))


@pytest.mark.parametrize("stop", [1, 5, 12, 17, 23])
def test_a_checkpoint_taken_up_at_any_step_ends_in_the_same_weights(small, tmp_path, stop):
    second = _stopped_and_resumed(small, "number", stop, tmp_path / "kept")
    whole = _trained(small)
    assert _same(second, whole)
    assert second.curve == whole.curve


def test_a_checkpoint_that_is_cut_short_is_not_taken_up(small, tmp_path):
    learner = training.Learner(small, "number", 3)
    learner.advance()
    (tmp_path / "kept").write_bytes(learner.to_bytes()[:-10])
    assert not training.Learner(small, "number", 3).restore(tmp_path / "kept")
    assert not training.Learner(small, "number", 3).restore(tmp_path / "missing")


def test_training_lowers_the_loss(small):
    longer = replace(small.recipes["number"], stages=(Stage(60, 3e-3, 4, ("text",)),))
    learner = training.Learner(replace(small, recipes={"number": longer}), "number", 0)
    lesson = learner.lessons.draw("text", (7, 7), 64)

    def loss() -> float:
        logits = training.answer_logits(learner.model, lesson).flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, lesson.answers.flatten()).detach())

    before = loss()
    while not learner.done:
        learner.advance()
    assert loss() < 0.7 * before


def test_teacher_forced_logits_are_those_of_a_full_run(small):
    learner = training.Learner(small, "number", 0)
    lesson = learner.lessons.draw("vision", (0, 0), 4)
    got = training.answer_logits(learner.model, lesson)
    learner.model.raw.set_use_fused_attention(False)
    batch = lesson.batch.extend(lesson.answers[:, :-1])
    torch.testing.assert_close(got, learner.model.run(batch).logits, atol=1e-5, rtol=1e-5)


def test_training_never_shows_pictures_beyond_the_boundary_nor_test_examples(small):
    lessons = training.Learner(small, "number", 0).lessons
    seen = {}
    for modality in ("vision", "text"):
        items = [
            lessons._items(modality, np.arange(4), (0, 0, step), "train") for step in range(20)
        ]
        assert all(split_of(item) == "train" for group in items for item in group)
        drawn = [lessons.draw(modality, (0, step), 32).answers[:, :2] for step in range(20)]
        digits = torch.tensor(lessons.asker.model.tokenizer.digits)
        tens, units = (torch.cat(drawn)[..., None] == digits).int().argmax(-1).T
        seen[modality] = set((10 * tens + units).tolist())
    assert seen == {"vision": set(range(4)), "text": set(range(7))}


@pytest.mark.parametrize("near", [0.0, 0.25, 1.0])
def test_half_of_the_true_false_pairs_are_equal_and_of_the_others_a_share_is_near(small, near):
    asker, rng = training.Learner(small, "truth", 0).lessons.asker, np.random.default_rng(0)
    others = Lessons(asker, World(size=8), "truth", 0, near)._others(np.full(8000, 30), rng)
    away = np.abs(others - 30)[others != 30]
    assert len(away) / 8000 == pytest.approx(0.5, abs=0.02)
    assert (away <= 5).mean() == pytest.approx(near + (1 - near) * 10 / 63, abs=0.02)
    assert others.min() >= 0 and others.max() <= 63  # all 64 letters: one string, in one split
    assert set(away) == set(range(1, 34) if near < 1 else range(1, 6))


@pytest.mark.parametrize("count", [0, 2, 63])
def test_near_strings_at_the_ends_stay_on_the_board_and_are_never_equal(small, count):
    asker, rng = training.Learner(small, "truth", 0).lessons.asker, np.random.default_rng(0)
    others = Lessons(asker, World(size=8), "truth", 0, 1.0)._others(np.full(500, count), rng)
    allowed = [n for n in range(64) if abs(n - count) <= 5]
    assert set(others) == set(allowed)


def _fixed(small: Preset, task: str, per_count: int = 8) -> Preset:
    """The same, on a set drawn once; stage 2 takes turns of two steps."""
    first, second = small.recipes[task].stages
    recipe = replace(
        small.recipes[task], per_count=per_count, stages=(first, replace(second, turn=2))
    )
    return replace(small, recipes={task: recipe})


def _texts(lesson) -> list[tuple[int, ...]]:
    return [tuple(row) for row in lesson.batch.tokens.tolist()]


@pytest.mark.parametrize("task", ["number", "truth"])
def test_every_epoch_takes_every_example_of_a_fixed_set_once_and_in_another_order(small, task):
    epochs = Epochs(training.Learner(small, task, 0).lessons, per_count=8)
    n = 8 * 7  # counts 0..6 are shown as text
    seen = [
        [
            row
            for start in range(0, n, 8)
            for row in _texts(epochs.draw("text", 0, e * n + start, 8))
        ]
        for e in range(3)
    ]
    assert seen[0] != seen[1] != seen[2]
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(seen[2])
    across = _texts(epochs.draw("text", 0, n - 4, 8))  # the end of one epoch, the start of the next
    assert across == seen[0][-4:] + seen[1][:4]


def test_a_fixed_set_has_as_many_examples_of_every_count_that_the_modality_is_shown(small):
    epochs = Epochs(training.Learner(small, "number", 0).lessons, per_count=8)
    for modality, top in (("vision", 3), ("text", 6)):
        counts, items, strings = epochs._set(modality)
        assert np.bincount(counts).tolist() == [8] * (top + 1)
        assert strings is None and all(split_of(item) == "train" for item in items)


def test_stages_take_turns_of_several_steps_and_each_modality_goes_through_its_own_epochs(small):
    learner = training.Learner(_fixed(small, "number"), "number", 0)
    learner.stage, asked = 1, []

    def asks(modality: str, stage: int, start: int, n: int):
        asked.append((modality, start))
        return Epochs(learner.lessons, 8).draw(modality, stage, start, n)

    learner.epochs.draw = asks
    for _ in range(6):
        learner.advance()
    assert asked == [
        ("vision", 0), ("vision", 8), ("text", 0), ("text", 8), ("vision", 16), ("vision", 24)
    ]  # fmt: skip


def test_training_on_a_fixed_set_resumes_bit_for_bit(small, tmp_path):
    fixed = _fixed(small, "truth")
    second = _stopped_and_resumed(fixed, "truth", 15, tmp_path / "kept")
    assert _same(second, _trained(fixed, "truth"))


def test_the_decoder_and_the_projector_can_learn_more_slowly_than_the_tower(small):
    first, second = small.recipes["number"].stages
    frozen = replace(second, decoder_lr=0.0, steps=3)
    recipe = replace(small.recipes["number"], stages=(frozen,), weight_decay=0.0)
    learner = training.Learner(replace(small, recipes={"number": recipe}), "number", 0)
    before = {k: v.clone() for k, v in learner.model.raw.state_dict().items()}
    while not learner.done:
        learner.advance()
    after = learner.model.raw.state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith("vision.") for k in moved)


def test_a_linear_decay_is_warmed_up_and_ends_at_the_floor():
    stage = Stage(100, 1e-3, 10, ("text",))
    rates = {
        decay: [
            training.learning_rate(Recipe((stage,), decay=decay, floor=0.0), stage, step)
            for step in (0, 9, 50, 99)
        ]
        for decay in ("linear", "cosine")
    }
    assert rates["linear"] == pytest.approx([1e-4, 0.91e-3, 0.5e-3, 1e-5])
    assert rates["cosine"] == pytest.approx([1e-4, 0.98015e-3, 0.5e-3, 2.47e-7], rel=1e-2)


def test_the_published_recipe_is_as_the_paper_gives_it():
    published = presets.preset("paper-original")
    world, recipe = published.world, published.recipes["number"]
    assert (world.size, world.spread, world.vision_max, world.text_max) == (19, 30, 49, 99)
    assert world.further == (100, 120)
    assert (recipe.batch, recipe.per_count, recipe.decay) == (1024, 8192, "linear")
    first, second = recipe.stages
    assert first.steps * 1024 == 20 * 8192 * 100 and second.steps * 1024 == 2 * 20 * 8192 * 50
    assert (first.lr, first.warmup, first.decoder_lr) == (2e-3, 50, None)
    assert (second.lr, second.decoder_lr, second.turn * 1024) == (1e-3, 1e-5, 2048)
    stack = published.config.decoder
    assert (stack.d_model, stack.n_heads, stack.n_layers) == (32, 2, 2)
    assert published.config.tower == stack


def test_unequal_numbers_are_near_as_often_as_asked_and_half_the_pairs_are_equal(small):
    lessons = training.Learner(small, "truth", 0).lessons
    counts = np.full(4000, 3)
    others = lessons._others(counts, np.random.default_rng(0))
    assert 0.46 < (others == counts).mean() < 0.54
    assert others.min() >= 0 and others.max() <= 15
    unequal = np.abs(others - counts)[others != counts]
    # near: 1..5 away by design, and uniform draws over 15 other numbers fall there in 8 of 15
    assert 0.72 < (unequal <= 5).mean() < 0.81


def test_truth_answers_say_whether_the_numbers_agree(small):
    lessons = training.Learner(small, "truth", 0).lessons
    lesson = lessons.draw("text", (0, 0), 50)
    spans = lesson.batch.layout.spans[0]
    c = lessons.asker.model.tokenizer.id("c")
    item, string = (
        (lesson.batch.tokens[:, slice(*spans[name])] == c).sum(1) for name in ("item", "string")
    )
    true = lessons.asker.model.tokenizer.id("True")
    assert torch.equal(lesson.answers[:, 0] == true, item == string)
    assert number_of_c(np.array([[2, 2, 0]], dtype=np.int8)).tolist() == [2]


def test_the_command_leaves_models_with_cards_that_load(registered, tmp_path):
    path = training.run(training.Config(tmp_path / "run", model="small", seed=3))
    for task in ("number", "truth"):
        model, card = cards.load(cards.model_folder(str(path), task, 3))
        assert card["task"] == task and card["seed"] == 3
        assert set(card["scores"]) == {
            f"{m}.{r}" for m in ("vision", "text") for r in ("id", "ve", "fe")
        }
        assert [p["step"] for p in card["curve"]] == [12, 12]
        precise = _trained(registered, task).model.raw.state_dict()
        kept = model.raw.state_dict()
        for name, value in precise.items():
            torch.testing.assert_close(kept[name], value, atol=2e-3, rtol=2e-3)
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["number.text.id"] == cards.read_card(path / "number")["scores"]["text.id"]


def test_a_training_that_is_killed_goes_on_and_ends_in_the_same_file(
    registered, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "CHECKPOINT_EVERY", 3)
    whole = training.run(training.Config(tmp_path / "whole", model="small", seed=3))

    class Killed(BaseException):
        pass

    for stop_at in (0.3, 0.8):

        def stop(what: str, share: float, stop_at: float = stop_at) -> None:
            if what.startswith("truth") and share > stop_at:
                raise Killed

        with pytest.raises(Killed):
            training.run(training.Config(tmp_path / "cut", model="small", seed=3), stop)
        assert not (tmp_path / "cut").exists()
    steps = []
    training.run(
        training.Config(tmp_path / "cut", model="small", seed=3),
        lambda what, share: steps.append((what, share)),
    )
    assert min(share for what, share in steps if what.startswith("truth")) > 0.7
    for task in ("number", "truth"):
        files = [(root / task / cards.WEIGHTS).read_bytes() for root in (whole, tmp_path / "cut")]
        assert files[0] == files[1]


def test_an_unknown_preset_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(InputError, match="no preset 'huge'; there are tiny"):
        training.run(training.Config(tmp_path / "run", model="huge"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_survives_sigkill(tmp_path):
    command = [
        sys.executable,
        "-m",
        "circuits",
        "counting",
        "train",
        "--out",
        str(tmp_path / "run"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    partial = tmp_path / "run.partial"
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(partial.rglob("number.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert list(partial.rglob("number.safetensors"))
    assert not (tmp_path / "run").exists()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as second:
        said = second.stdout.readline()
        second.kill()
    assert float(said.split("%")[0].split()[-1]) > 0
