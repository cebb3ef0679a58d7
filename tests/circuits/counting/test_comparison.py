"""The True/False model's answers by distance: what is asked, how it is scored, how sure it is."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from circuits.counting import comparison
from circuits.counting.boards import C, World, split_of
from circuits.counting.comparison import Config, combined, draw_pairs, first_of_each_count
from circuits.counting.examples import load_examples, make_examples, save_examples
from circuits.counting.questions import Asker, vocabulary
from circuits.counting.subject import Subject
from circuits.runs import Result
from interp.errors import InputError
from interp.model import generate
from interp.toy import StackConfig, ToyConfig, ToyVLM

WORLD = World(size=5, spread=3, vision_max=2, text_max=4, further=(5, 6))
CONFIG = Config(distances=(1, 3, 4), items_per_count=3)
STACK = StackConfig(d_model=16, d_head=8, d_mlp=32)


def toy(seed=0):
    return ToyVLM(ToyConfig(vocabulary(), grid=5, decoder=STACK, tower=STACK), seed=seed)


def subject_of(truth, examples=None, world=WORLD):
    if examples is None:
        examples = make_examples(world, per_count=4, seed=0)
    return Subject(toy(), truth, toy(), world, examples)


def saying(word):
    """A model that always answers with one word."""
    model = toy()
    model.raw.unembed.b_U[model.tokenizer.id(word)] = 1000.0
    return model


@pytest.fixture(scope="module")
def undecided():
    """A model that says True to about half of the questions, as its random weights have it."""
    model = toy(seed=3)
    examples = make_examples(WORLD, per_count=2, seed=9)
    ids = [model.tokenizer.id(word) for word in ("False", "True")]
    logits = [
        model.run(Asker(model).truth(modality, items, examples.equal), logits_at="last").logits
        for modality, items in (("vision", examples.boards), ("text", examples.strings))
    ]
    false, true = torch.cat(logits)[:, 0, ids].T
    model.raw.unembed.b_U[ids] += 100.0
    model.raw.unembed.b_U[ids[0]] += (true - false).median()
    return model


@pytest.fixture(scope="module")
def result(undecided):
    return comparison.run(CONFIG, subject_of(undecided))


def number_of_c(strings):
    return np.array([list(string).count(C) for string in strings])


def after_json(result):
    return Result(
        *(json.loads(json.dumps(v, allow_nan=False)) for v in (result.metrics, result.data))
    )


# What is asked


def test_drawn_strings_are_exactly_as_far_apart_as_asked_and_in_the_test_split():
    examples = make_examples(World(), per_count=10, seed=2)
    for regime, mask in examples.regimes(World()).items():
        own = examples.select(mask)
        pairs = draw_pairs(own, World(), (1, 2, 3, 5, 10), seed=2)
        assert pairs.distances == (1, 2, 3, 5, 10), regime
        for distance, strings in zip(pairs.distances, pairs.strings[2:], strict=True):
            assert (np.abs(number_of_c(strings) - own.counts) == distance).all()
            assert {split_of(string) for string in strings} == {"test"}


def test_more_and_fewer_are_as_frequent_where_both_are_possible():
    examples = make_examples(World(), per_count=10, seed=0, counts=range(20, 40))
    pairs = draw_pairs(examples, World(), (1, 5, 10), seed=0)
    for strings in pairs.strings[2:]:
        more = np.count_nonzero(number_of_c(strings) > examples.counts)
        assert abs(more - 100) < 3.5 * np.sqrt(50)  # 200 fair coins


def test_near_zero_the_other_number_is_larger():
    examples = make_examples(World(), per_count=10, seed=0, counts=range(5))
    strings = draw_pairs(examples, World(), (5,), seed=0).strings[2]
    np.testing.assert_array_equal(number_of_c(strings), examples.counts + 5)


def test_near_the_full_string_the_other_number_is_smaller():
    world = World(further=(58, 62))
    examples = make_examples(world, per_count=10, seed=0, counts=range(59, 63))
    strings = draw_pairs(examples, world, (5,), seed=0).strings[2]
    np.testing.assert_array_equal(number_of_c(strings), examples.counts - 5)


def test_the_equal_and_the_unequal_string_are_the_examples_own():
    examples = make_examples(WORLD, per_count=2, seed=4)
    pairs = draw_pairs(examples, WORLD, (1,), seed=0)
    np.testing.assert_array_equal(pairs.strings[0], examples.equal)
    np.testing.assert_array_equal(pairs.strings[1], examples.unequal)
    np.testing.assert_array_equal(pairs.same.all(1), [True, False, False])


def test_a_distance_that_some_count_cannot_have_is_left_out_in_its_regime(undecided):
    far = replace(CONFIG, distances=(2, 19))  # 25 cells: 6 - 19 < 0 and 6 + 19 is the full string
    metrics = comparison.run(far, subject_of(undecided)).metrics
    assert "comparison.vision.id.distance_19" in metrics
    assert "comparison.vision.fe.distance_19" not in metrics
    assert "comparison.vision.fe.distance_2" in metrics


def test_the_first_examples_of_every_count_are_taken():
    counts = np.array([3, 1, 3, 3, 1, 2])
    chosen = first_of_each_count(counts, 2)
    np.testing.assert_array_equal(chosen, [True, True, True, False, True, True])


# How it is scored


def naive_answers(model, modality, pairs):
    """One question at a time, the board as a rendered picture, the answer freely generated."""
    asker, examples = Asker(model), pairs.examples
    items = examples.boards if modality == "vision" else examples.strings
    said = []
    for strings in pairs.strings:
        for item, string in zip(items, strings, strict=True):
            batch = model.encode([asker.prompt("truth", modality, item, string)])
            token = generate(model, batch, max_new_tokens=1)
            said.append(model.decode(token)[0].strip())
    return np.array(said).reshape(len(pairs.strings), -1)


def expected_shares(said, counts, strings):
    """From the definitions, one comparison after the other."""
    right = [
        [word == str(number == count) for word, number, count in zip(*row, strict=True)]
        for row in zip(said, map(number_of_c, strings), [counts] * len(said), strict=True)
    ]
    equal, unequal, d1, d3, d4 = (sum(row) / len(row) for row in right)
    true = [np.mean(row == "True") for row in said]
    return {
        "": (equal + unequal) / 2,
        ".equal": equal,
        ".unequal": unequal,
        ".distance_0": equal,
        ".distance_1": d1,
        ".distance_3": d3,
        ".distance_4": d4,
        ".balanced_1": (equal + d1) / 2,
        ".balanced_3": (equal + d3) / 2,
        ".balanced_4": (equal + d4) / 2,
        ".near": equal / 2 + (d1 + d3) / 4,
        ".says_true": true[0] / 2 + np.mean(true[2:]) / 2,
    }


def test_every_share_is_that_of_questions_asked_one_at_a_time(undecided):
    subject, varied = subject_of(undecided), set()
    result = comparison.run(replace(CONFIG, items_per_count=1), subject)
    for regime, mask in subject.regimes.items():
        own = subject.examples.select(mask)
        own = own.select(first_of_each_count(own.counts, 1))
        pairs, near = draw_pairs(own, WORLD, CONFIG.distances, seed=0), {}
        for modality in ("vision", "text"):
            said = naive_answers(undecided, modality, pairs)
            varied |= set(said.ravel())
            expected = expected_shares(said, own.counts, pairs.strings)
            near[modality] = expected[".near"]
            for name, share in expected.items():
                key = f"comparison.{modality}.{regime}{name}"
                assert result.metrics[key] == pytest.approx(share), key
                assert result.metrics[f"{key}.low"] <= share + 1e-9, key
                assert result.metrics[f"{key}.high"] >= share - 1e-9, key
                assert result.metrics[f"{key}.n"] == len(own), key
        gap = near["text"] - near["vision"]
        assert result.metrics[f"comparison.gap.{regime}"] == pytest.approx(gap)
    assert varied == {"True", "False"}


def test_a_model_that_always_says_true_gets_half_of_every_balanced_share():
    metrics = comparison.run(CONFIG, subject_of(saying("True"))).metrics
    for modality in ("vision", "text"):
        for regime in ("id", "ve", "fe"):
            key = f"comparison.{modality}.{regime}"
            for balanced in ("", ".near", ".balanced_1", ".balanced_4"):
                assert metrics[key + balanced] == pytest.approx(0.5)
            assert metrics[f"{key}.equal"] == metrics[f"{key}.says_true"] == 1
            assert metrics[f"{key}.unequal"] == metrics[f"{key}.distance_1"] == 0
            assert metrics[f"comparison.invalid.{modality}.{regime}"] == 0
    assert metrics["comparison.gap.ve"] == pytest.approx(0)
    assert metrics["comparison.gap.ve.beyond_id"] == pytest.approx(0)


def test_an_answer_that_is_neither_true_nor_false_is_wrong_and_counted():
    metrics = comparison.run(CONFIG, subject_of(saying("7"))).metrics
    assert metrics["comparison.invalid.vision.ve"] == pytest.approx(1)
    assert metrics["comparison.vision.ve"] == metrics["comparison.text.id.near"] == 0
    assert metrics["comparison.vision.ve.says_true"] == 0


def test_the_gap_beyond_id_is_the_difference_of_two_gaps(result):
    m = result.metrics
    beyond = m["comparison.gap.ve"] - m["comparison.gap.id"]
    assert m["comparison.gap.ve.beyond_id"] == pytest.approx(beyond)
    assert "comparison.gap.id.beyond_id" not in m
    wider = m["comparison.gap.ve.beyond_id.high"] - m["comparison.gap.ve.beyond_id.low"]
    assert wider > m["comparison.gap.ve.high"] - m["comparison.gap.ve.low"]


def test_runs_of_one_seed_agree_and_another_seed_draws_other_strings(undecided, result):
    again = comparison.run(CONFIG, subject_of(undecided))
    assert (again.metrics, again.data) == (result.metrics, result.data)
    examples = make_examples(WORLD, per_count=2, seed=0, counts=range(3))
    one, other = (draw_pairs(examples, WORLD, (1,), seed).strings for seed in (0, 1))
    np.testing.assert_array_equal(one[:2], other[:2])
    assert (one[2] != other[2]).any()


# How sure it is


def test_a_combined_share_of_all_right_has_the_width_that_wilson_gives():
    counts, right = np.repeat(np.arange(10), 2), np.ones(20, dtype=bool)
    value, low, high, n = combined([(0.5, right), (0.5, right)], counts)
    wilson_low, _ = proportion_confint(20, 20, method="wilson")
    assert (value, high, n) == (1, 1, 20)
    assert low == pytest.approx(1 - (1 - wilson_low) / np.sqrt(2))


def test_without_spread_between_counts_a_difference_has_newcombes_interval():
    counts, half = np.repeat(np.arange(10), 2), np.tile([True, False], 10)
    right = np.ones(20, dtype=bool)
    _, low, high, _ = combined([(1.0, right), (-1.0, half)], counts)
    expected = confint_proportions_2indep(20, 20, 10, 20, method="newcomb", compare="diff")
    assert (low, high) == pytest.approx(expected, abs=1e-6)


def test_counts_that_are_right_or_wrong_as_a_whole_widen_the_interval():
    counts = np.repeat(np.arange(10), 40)
    right = counts < 5
    _, low, high, _ = combined([(1.0, right)], counts)
    wilson_low, wilson_high = proportion_confint(200, 400, method="wilson")
    assert low < wilson_low - 0.1 and high > wilson_high + 0.1


# Few examples, and what is shown


@pytest.mark.parametrize("counts", [range(0, 2), range(4, 5), range(5, 7)])
def test_a_regime_without_examples_is_absent(undecided, counts):
    examples = make_examples(WORLD, per_count=1, seed=0, counts=counts)
    result = after_json(comparison.run(CONFIG, subject_of(undecided, examples)))
    regime = WORLD.regime_of(counts[0])
    assert {"id", "ve", "fe"} & {p for key in result.metrics for p in key.split(".")} == {regime}
    assert [row[1] for row in comparison.table(result).rows] == [regime.upper()] * 2
    comparison.figure(result).savefig("/dev/null", format="png")
    plt.close("all")


def test_records_that_others_made_are_compared_with_their_own_strings(undecided, tmp_path):
    path = tmp_path / "records.jsonl"
    save_examples(make_examples(WORLD, per_count=1, seed=7), path)
    loaded = load_examples(path, WORLD)
    metrics = comparison.run(CONFIG, subject_of(undecided, loaded)).metrics
    fresh = subject_of(undecided, make_examples(WORLD, per_count=1, seed=7))
    assert metrics == comparison.run(CONFIG, fresh).metrics


def test_without_distances_the_published_kind_of_pair_is_left(undecided):
    result = after_json(comparison.run(replace(CONFIG, distances=()), subject_of(undecided)))
    assert "comparison.vision.ve" in result.metrics
    assert not {k for k in result.metrics if "near" in k or "gap" in k or "balanced" in k}
    comparison.figure(result)
    plt.close("all")


def test_the_figure_has_a_panel_for_each_regime_and_one_for_the_counts(result):
    fig = comparison.figure(after_json(result))
    assert [ax.get_title() for ax in fig.axes] == ["ID", "VE", "FE", ""]
    ticks = [tick.get_text() for tick in fig.axes[0].get_xticklabels()]
    assert ticks == ["equal", "1", "3", "4"]
    line = fig.axes[3].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), range(7))
    plt.close(fig)


def test_the_table_has_a_row_for_each_modality_and_regime(result):
    table = comparison.table(after_json(result))
    assert [tuple(row[:2]) for row in table.rows] == [
        (modality, regime) for modality in ("vision", "text") for regime in ("ID", "VE", "FE")
    ]
    share = 100 * result.metrics["comparison.vision.id"]
    assert table.rows[0][2].startswith(f"{share:.1f} [")
    assert "Text minus vision" in table.caption


@pytest.mark.parametrize(
    "wrong",
    [{"items_per_count": 0}, {"distances": (0, 1)}, {"distances": (2, 2)}, {"distances": (-1,)}],
)
def test_a_setting_that_makes_no_sense_is_refused(undecided, wrong):
    with pytest.raises(InputError, match=str(next(iter(wrong)))):
        comparison.run(replace(CONFIG, **wrong), subject_of(undecided))
