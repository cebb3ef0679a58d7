"""Hidden number: what the probe is trained on, what it reads, and the gaps, recounted by hand."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from einops import rearrange
from statsmodels.stats.proportion import proportion_confint

from circuits.counting import hidden_number
from circuits.counting.boards import BLACK, EMPTY, WHITE, World, render, split_of
from circuits.counting.examples import make_examples
from circuits.counting.hidden_number import Config, balanced, called_kinds, fit_probe, probe_boards
from circuits.counting.questions import Asker, vocabulary
from circuits.counting.subject import Subject
from circuits.runs import Result
from interp.errors import InputError
from interp.toy import StackConfig, ToyConfig, ToyVLM

WORLD = World(size=4, spread=3, vision_max=5, text_max=8, further=(9, 10))
STACK = StackConfig(n_layers=1, n_heads=2, d_model=16, d_head=4, d_mlp=16)
CONFIG = Config(probe_boards=60)


def model(seed):
    return ToyVLM(ToyConfig(vocabulary(), grid=4, decoder=STACK, tower=STACK), seed=seed)


def subject_of(number=None, *, examples=None):
    number = number or model(1)
    if examples is None:
        examples = make_examples(WORLD, per_count=4, seed=0)
    return Subject(number, model(2), model(3), WORLD, examples)


def blind():
    """A model whose encoder sees nothing: every patch looks the same."""
    number = model(1)
    number.raw.vision.W_patch.zero_()
    return number


@pytest.fixture(scope="module")
def subject():
    return subject_of()


@pytest.fixture(scope="module")
def result(subject):
    return hidden_number.run(CONFIG, subject)


@pytest.fixture(scope="module")
def of_blind():
    return hidden_number.run(CONFIG, subject_of(blind()))


def written(result):
    """A result as it comes back from a run folder."""
    return Result(*json.loads(json.dumps([result.metrics, result.data], allow_nan=False)))


# --- what the probe is trained on ---------------------------------------------------------------


def test_the_probe_is_trained_on_id_counts_of_the_training_split_in_equal_parts(subject):
    boards = probe_boards(subject, CONFIG)
    counts = (boards == BLACK).sum((1, 2))
    assert {split_of(board) for board in boards} == {"train"}
    assert np.bincount(counts).tolist() == [10] * (WORLD.vision_max + 1)


def test_no_board_of_a_test_set_is_trained_on_even_where_the_set_is_of_the_training_split(subject):
    boards = probe_boards(subject, CONFIG)
    tests = boards[np.argsort((boards == BLACK).sum((1, 2)), kind="stable")][::2]
    made = make_examples(WORLD, per_count=5, seed=1, counts=range(6))
    other = subject_of(examples=replace(made, boards=tests))
    left = {board.tobytes() for board in probe_boards(other, CONFIG)}
    assert left == {board.tobytes() for board in boards} - {board.tobytes() for board in tests}


def test_other_seeds_draw_other_boards_and_one_seed_the_same(subject):
    first, again = probe_boards(subject, CONFIG), probe_boards(subject, CONFIG)
    other = probe_boards(subject, replace(CONFIG, probe_seed=1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(first, probe_boards(subject, replace(CONFIG, data_seed=9)))


def test_classes_are_balanced_two_to_one_to_one_and_no_patch_is_taken_twice():
    kinds = np.repeat(np.array([EMPTY, BLACK, WHITE], dtype=np.int8), [100, 31, 20])
    chosen = balanced(kinds, seed=0)
    assert len(set(chosen.tolist())) == len(chosen) == 60
    assert np.bincount(kinds[chosen], minlength=3).tolist() == [15, 30, 15]
    assert np.array_equal(chosen, balanced(kinds, seed=0))
    assert not np.array_equal(chosen, balanced(kinds, seed=1))


@pytest.mark.parametrize("numbers", [(9, 9, 0), (9, 1, 9), (0, 9, 9)])
def test_boards_without_enough_of_a_kind_are_refused_with_their_numbers(numbers):
    kinds = np.repeat(np.array([EMPTY, BLACK, WHITE], dtype=np.int8), numbers)
    with pytest.raises(
        InputError, match=f"{numbers[1]} black, {numbers[2]} white and {numbers[0]}"
    ):
        balanced(kinds, seed=0)


@pytest.mark.parametrize("number", [0, -1])
def test_no_boards_to_fit_on_are_refused(subject, number):
    with pytest.raises(InputError, match=f"probe_boards is {number}"):
        hidden_number.run(Config(probe_boards=number), subject)


def test_an_encoder_that_does_not_exist_names_those_that_do(subject):
    with pytest.raises(InputError, match="no encoder 'eye'; there are trained, untrained, pixels"):
        fit_probe(subject, CONFIG, encoder="eye")


# --- what it reads ------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["trained", "untrained"])
def test_the_probe_reads_the_encoders_output_on_every_patch_of_the_rendered_picture(
    subject, encoder
):
    vlm = subject.number if encoder == "trained" else subject.untrained
    probe, boards = fit_probe(subject, CONFIG, encoder=encoder), subject.examples.boards[:6]
    prompts = [Asker(vlm).prompt("number", "vision", board) for board in boards]
    site = "vision.ln_final.normalized"
    seen = vlm.run(vlm.encode(prompts), cache=[site]).cache[site]
    want = probe.predict(seen).view(6, 16).numpy()
    assert np.array_equal(called_kinds(probe, subject, boards, encoder=encoder), want)


def test_the_probe_on_pixels_reads_the_patches_of_the_rendered_picture(subject):
    probe, boards = fit_probe(subject, CONFIG, encoder="pixels"), subject.examples.boards[:6]
    pictures = np.stack([render(board) for board in boards])
    patches = rearrange(pictures, "b (y p) (x q) c -> b (y x) (p q c)", p=14, q=14)
    want = probe.predict(torch.from_numpy(patches) / 255).numpy()
    assert np.array_equal(called_kinds(probe, subject, boards, encoder="pixels"), want)
    assert np.array_equal(want, boards.reshape(6, -1))


def test_an_encoder_that_sees_nothing_has_a_probe_that_calls_the_commonest_class(of_blind):
    """Half of the fitted patches are black, so all 16 are called black: N_H - N_G is 16 - N_G."""
    for regime, counts in WORLD.regimes.items():
        assert of_blind.metrics[f"probe.trained.exact.{regime}"] == 0
        gap = 16 - np.mean(counts)
        assert of_blind.metrics[f"vision_gap.{regime}"] == pytest.approx(gap)
        patch = of_blind.metrics[f"probe.trained.patch.{regime}"]
        assert patch == pytest.approx(np.mean(counts) / 16)


def test_that_an_encoder_sees_nothing_leaves_the_other_two_as_they_are(of_blind, result):
    for encoder in ("untrained", "pixels"):
        for regime in WORLD.regimes:
            key = f"probe.{encoder}.exact.{regime}"
            assert of_blind.metrics[key] == result.metrics[key]
            key = f"vision_gap.{encoder}.{regime}"
            assert of_blind.metrics[key] == result.metrics[key]


# --- gaps ---------------------------------------------------------------------------------------


def test_gaps_are_mean_distances_of_hidden_number_truth_and_answers_held_to_digits(of_blind):
    subject = subject_of(blind())
    vision, text = (subject.answers(m, digits=True) for m in ("vision", "text"))
    for regime, counts in WORLD.regimes.items():
        own = [i for i, n in enumerate(subject.examples.counts) if n in counts]
        language = np.mean([abs(16 - vision[i]) for i in own])
        assert of_blind.metrics[f"language_gap.{regime}"] == pytest.approx(language)
        control = np.mean([abs(subject.examples.counts[i] - text[i]) for i in own])
        assert of_blind.metrics[f"language_gap.text.{regime}"] == pytest.approx(control)
        assert of_blind.metrics[f"language_gap.{regime}.n"] == len(own) == 4 * len(counts)


def test_gaps_of_single_counts_are_in_the_data_of_the_figure(of_blind):
    rows = of_blind.data["vision_gap"]
    assert [row["count"] for row in rows] == list(WORLD.counts)
    assert [row["value"] for row in rows] == [16 - n for n in WORLD.counts]
    assert {row["n"] for row in rows} == {4}


def test_pixels_are_exact_everywhere_with_wilsons_interval(result):
    for regime, counts in WORLD.regimes.items():
        key, n = f"probe.pixels.exact.{regime}", 4 * len(counts)
        assert result.metrics[key] == 1
        low, _ = proportion_confint(n, n, method="wilson")
        assert result.metrics[f"{key}.low"] == pytest.approx(low)


def test_patches_that_are_all_called_right_do_not_make_a_certainty_of_few_boards(result):
    for regime, counts in WORLD.regimes.items():
        n = 4 * len(counts)
        low, _ = proportion_confint(n, n, method="wilson")
        assert result.metrics[f"probe.pixels.patch.{regime}.low"] == pytest.approx(low)
        assert result.metrics[f"probe.pixels.patch.{regime}.n"] == n


def test_the_interval_of_a_gap_draws_whole_counts(of_blind):
    """All boards of a count have one gap, so boards drawn alone would give a narrower interval."""
    low, high = (of_blind.metrics[f"vision_gap.id.{end}"] for end in ("low", "high"))
    spread = np.std(np.arange(6)) / np.sqrt(6)  # of the mean of six counts drawn with replacement
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.15)


# --- the result ---------------------------------------------------------------------------------


def test_every_number_has_its_interval_and_its_number_of_examples(result):
    names = [f"probe.{e}.{w}" for e in hidden_number.ENCODERS for w in ("exact", "patch")]
    names += ["vision_gap", "vision_gap.untrained", "vision_gap.pixels"]
    names += ["language_gap", "language_gap.text"]
    keys = [f"{name}.{regime}" for name in names for regime in ("id", "ve", "fe")]
    assert set(result.metrics) == {k + end for k in keys for end in ("", ".low", ".high", ".n")}
    for key in keys:
        low, value, high = (result.metrics[key + end] for end in (".low", "", ".high"))
        assert 0 <= low <= value <= high <= (1 if key.startswith("probe") else 99)


def test_two_runs_are_equal(subject, result):
    assert hidden_number.run(CONFIG, subject) == result


@pytest.mark.parametrize("counts", [range(6), (7,), (9, 10), (0,)])
def test_regimes_without_examples_are_absent_and_one_example_is_enough(counts):
    examples = make_examples(WORLD, per_count=1, seed=0, counts=counts)
    result = written(hidden_number.run(CONFIG, subject_of(examples=examples)))
    regimes = {WORLD.regime_of(count) for count in counts}
    assert {
        key.removesuffix(".n").split(".")[-1] for key in result.metrics if ".n" in key
    } == regimes
    assert set(result.data["regimes"]) == regimes
    assert len(hidden_number.table(result).rows) == len(regimes)
    plt.close(hidden_number.figure(result))


def test_the_figure_draws_all_gaps_from_the_data_alone(of_blind):
    result = replace(written(of_blind), metrics={})
    fig = hidden_number.figure(result)
    lines = {(i, line.get_label()): line for i, ax in enumerate(fig.axes) for line in ax.lines}
    drawn = {
        (0, "trained encoder"): "vision_gap",
        (0, "untrained encoder"): "vision_gap.untrained",
        (0, "raw pixels"): "vision_gap.pixels",
        (1, "pictures"): "language_gap",
        (1, "text (control)"): "language_gap.text",
    }
    for place, key in drawn.items():
        assert lines[place].get_ydata().tolist() == [row["value"] for row in result.data[key]]
    assert "stones" in fig.axes[0].get_ylabel() and "stones" in fig.axes[1].get_ylabel()
    assert {text.get_text() for text in fig.axes[0].texts} == {"ID", "VE", "FE"}
    plt.close(fig)


def test_the_table_has_a_row_for_each_regime(of_blind):
    table = hidden_number.table(written(of_blind))
    assert [row[0] for row in table.rows] == ["ID", "VE", "FE"]
    assert table.rows[0][1].startswith("0.0 [0.0, ")
    assert table.rows[0][4].startswith("13.50 [")
