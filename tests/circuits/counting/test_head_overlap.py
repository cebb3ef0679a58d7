"""Needed heads: found as by hand, compared pair by pair, and judged against both baselines."""

import json
from dataclasses import replace
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from scipy.stats import hypergeom
from statsmodels.stats.proportion import proportion_confint

from circuits.counting import head_overlap
from circuits.counting.boards import World
from circuits.counting.examples import make_examples
from circuits.counting.head_overlap import Config, needed_heads, smallest_p
from circuits.counting.head_pairs import by_count, excess, over_counts, permutation_p
from circuits.counting.head_ranking import (
    Samples,
    overlap_p,
    overlap_p_within,
    rate,
    top_metrics,
)
from circuits.counting.questions import Asker, vocabulary
from circuits.counting.subject import Subject
from circuits.runs import Result
from interp.errors import InputError
from interp.toy import StackConfig, ToyConfig, ToyVLM

WORLD = World(size=4, spread=3, vision_max=3, text_max=5, further=(6, 7))
CONFIG = Config(samples_per_count=3, permutations=50)
STACK = StackConfig(d_head=8, d_mlp=32)


def toy(seed=0, stack=STACK):
    return ToyVLM(ToyConfig(vocabulary(), grid=4, decoder=stack, tower=STACK), seed=seed)


def subject_of(model, counts=None):
    examples = make_examples(WORLD, per_count=4, seed=0, counts=counts)
    return Subject(model, toy(), toy(), WORLD, examples)


@torch.no_grad()
def always_three():
    """A model whose answer is always "0 3": "3" because head 0 of block 0 writes it.

    That head attends anywhere and writes one direction; nothing else writes. Behind "?" the answer
    is "0", behind "3" the end; behind "0" it is "3" where the direction is there, else "5".
    """
    raw = toy(seed=1).raw
    for block in raw.blocks:
        for weight in (block.attn.W_O, block.attn.W_V, block.attn.b_V, block.mlp.W_out):
            weight.zero_()
    axes = dict(zip(["?", "0", "3", "<eos>", "head"], torch.eye(32), strict=False))
    for word in ("?", "0", "3"):
        raw.W_E[raw.tokenizer.id(word)] = axes[word] - axes["<eos>"]
    raw.blocks[0].attn.b_V[0, 0] = 1.0
    raw.blocks[0].attn.W_O[0, 0] = axes["head"]
    raw.unembed.W_U.zero_()
    for behind, word, strength in (("?", "0", 9), ("3", "<eos>", 9), ("head", "3", 3)):
        raw.unembed.W_U[:, raw.tokenizer.id(word)] = strength * axes[behind]
    raw.unembed.b_U[raw.tokenizer.id("5")] = 1.0
    model = toy(seed=1)
    model.raw.load_state_dict(raw.state_dict())
    return model


def pairs_of(vectors, kind):
    """All pairs of samples of the same count, as a list of pairs of vectors, by count."""
    found = {}
    for count in sorted(set(vectors["vision"]) | set(vectors["text"])):
        vision, text = (vectors[m].get(count, []) for m in ("vision", "text"))
        one = {"vision": combinations(vision, 2), "text": combinations(text, 2)}
        found[count] = list(product(vision, text) if kind == "cross" else one[kind])
    return found


def measured(pairs):
    """The four measures from their definitions, one pair after the other."""
    sets = [(set(np.flatnonzero(a)), set(np.flatnonzero(b))) for a, b in pairs]
    some = [(a, b) for a, b in sets if a or b]
    both = [(a, b) for a, b in sets if a and b]
    return {
        "differ": np.mean([a != b for a, b in some]),
        "jaccard": np.mean([len(a & b) / len(a | b) for a, b in some]),
        "disjoint": np.mean([not a & b for a, b in both]),
        "empty": np.mean([not (a or b) for a, b in sets]),
    }


@pytest.fixture(scope="module")
def vectors():
    """Planted vectors of five counts: some empty, one count with a single text sample."""
    rng, found = np.random.default_rng(5), {"vision": {}, "text": {}}
    for count in range(5):
        for modality, share in (("vision", 0.15), ("text", 0.3)):
            n = 1 if (count, modality) == (2, "text") else int(rng.integers(4, 8))
            found[modality][count] = rng.random((n, 8)) < share
    found["vision"][7] = rng.random((3, 8)) < 0.2
    return found


# Which heads are needed


@torch.no_grad()
def naive_needed(model, modality, item, count):
    """One sample, one head at a time: the head's output weights are zero in a copy of the model."""
    asker, zero = Asker(model), model.tokenizer.digits[count // 10]
    batch = model.encode([asker.prompt("number", modality, item)])
    batch = batch.extend(torch.tensor([[zero]]))
    clean = model.run(batch).logits[0].argmax(-1)
    needed = np.zeros((2, model.cfg.n_layers, model.cfg.n_heads), dtype=bool)
    for layer, head in np.ndindex(needed.shape[1:]):
        copy = ToyVLM(model.config)
        copy.raw.load_state_dict(model.raw.state_dict())
        copy.raw.blocks[layer].attn.W_O[head] = 0
        needed[:, layer, head] = (copy.run(batch).logits[0].argmax(-1) != clean).numpy()
    return needed


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_needed_heads_are_those_of_single_samples_without_the_heads_weights(modality):
    model = toy(seed=2, stack=StackConfig(n_layers=2, n_heads=3, d_head=8, d_mlp=32))
    examples = make_examples(WORLD, per_count=2, seed=1, counts=range(4))
    items = examples.boards if modality == "vision" else examples.strings
    found = needed_heads(model, modality, items, examples.counts)
    naive = [
        naive_needed(model, modality, *one) for one in zip(items, examples.counts, strict=True)
    ]
    np.testing.assert_array_equal(found, naive)
    assert found.any() and not found.all()


def test_a_head_that_writes_nothing_is_not_needed():
    model = toy(seed=2)
    model.raw.blocks[1].attn.W_O[0] = 0
    examples = make_examples(WORLD, per_count=4, seed=1, counts=range(4))
    found = needed_heads(model, "text", examples.strings, examples.counts)
    assert not found[:, :, 1, 0].any()
    assert found[:, :, 0].any()


def test_the_one_head_that_writes_the_units_digit_is_found():
    result = head_overlap.run(CONFIG, subject_of(always_three()))
    for modality in ("vision", "text"):
        assert result.metrics[f"heads.left_out.{modality}"] == 0.75  # 0, 1 and 2 of 0..3
        assert result.metrics[f"heads.left_out.{modality}.n"] == 12
        for digit, layer, head in np.ndindex(2, 2, 2):
            key = f"heads.needed.{modality}.digit_{digit}.block_{layer}.head_{head}"
            assert result.metrics[key] == float((digit, layer, head) == (1, 0, 0)), key
            assert result.metrics[f"{key}.n"] == 3
    for kind, n in (("cross", 9), ("vision", 3), ("text", 3)):
        assert result.metrics[f"heads.differ.{kind}"] == 0
        assert result.metrics[f"heads.jaccard.{kind}"] == 1
        assert result.metrics[f"heads.empty.{kind}"] == 0
        assert result.metrics[f"heads.differ.{kind}.n"] == n
    assert result.metrics["heads.p"] == 1


def test_pairs_in_which_no_head_is_needed_are_counted_apart():
    model = always_three()
    model.raw.unembed.b_U[model.tokenizer.id("3")] = 2.0  # "3" also without the head
    metrics = head_overlap.run(CONFIG, subject_of(model)).metrics
    assert metrics["heads.empty.cross"] == 1
    assert not {key for key in metrics if "differ" in key or "jaccard" in key or "excess" in key}


def test_only_samples_that_are_answered_right_are_compared():
    result = head_overlap.run(CONFIG, subject_of(always_three()))
    assert [row["count"] for row in result.data["by_count"]] == [3]
    none = head_overlap.run(CONFIG, subject_of(always_three(), counts=[0, 1]))
    assert none.metrics["heads.left_out.vision"] == 1
    assert {key.split(".")[1] for key in none.metrics} == {"left_out", "smallest_p"}


# Pairs


def test_every_measure_is_that_of_pairs_taken_one_by_one(vectors):
    tables = by_count(vectors)
    metrics = head_overlap._pair_metrics(tables)
    for kind in ("cross", "vision", "text"):
        pairs = [pair for own in pairs_of(vectors, kind).values() for pair in own]
        for measure, share in measured(pairs).items():
            assert metrics[f"heads.{measure}.{kind}"] == pytest.approx(share), (measure, kind)
        assert metrics[f"heads.empty.{kind}.n"] == len(pairs)
        assert metrics[f"heads.differ.{kind}.n"] == sum((a | b).any() for a, b in pairs)
    baselines = metrics["heads.differ.vision"], metrics["heads.differ.text"]
    expected = metrics["heads.differ.cross"] - max(baselines)
    assert metrics["heads.excess"] == pytest.approx(expected)


def test_different_circuits_show_as_an_excess_and_a_small_p():
    one, other = np.eye(8, dtype=bool)[[0, 1]]
    planted = {
        "vision": {count: np.tile(one, (4, 1)) for count in range(6)},
        "text": {count: np.tile(other, (4, 1)) for count in range(6)},
    }
    tables = by_count(planted)
    metrics = head_overlap._pair_metrics(tables)
    assert metrics["heads.differ.cross"] == metrics["heads.disjoint.cross"] == 1
    assert metrics["heads.differ.vision"] == metrics["heads.jaccard.cross"] == 0
    assert metrics["heads.excess"] == 1 and 0.3 < metrics["heads.excess.low"] < 1
    assert permutation_p(tables, 199, seed=0) == 1 / 200


def test_vectors_that_differ_as_much_within_a_modality_have_no_excess():
    rng = np.random.default_rng(0)
    planted = {
        modality: {count: rng.random((10, 8)) < 0.1 for count in range(20)}
        for modality in ("vision", "text")
    }
    tables = by_count(planted)
    metrics = head_overlap._pair_metrics(tables)
    assert metrics["heads.differ.cross"] > 0.7  # what would be read as different circuits
    assert metrics["heads.excess.low"] < 0
    assert metrics["heads.excess"] < 0.05
    assert permutation_p(tables, 199, seed=0) > 0.05


def test_p_is_the_share_of_all_labellings_that_part_the_samples_as_much():
    rng = np.random.default_rng(4)
    vision, text = rng.random((4, 3)) < 0.2, rng.random((4, 3)) < 0.5
    both = np.concatenate([vision, text])

    def statistic(chosen):
        rest = [i for i in range(8) if i not in chosen]
        own = {"vision": {0: both[list(chosen)]}, "text": {0: both[rest]}}
        shares = [
            measured(pairs_of(own, kind)[0])["differ"] for kind in ("cross", "vision", "text")
        ]
        return shares[0] - (shares[1] + shares[2]) / 2

    observed = statistic((0, 1, 2, 3))
    as_large = [statistic(chosen) >= observed - 1e-12 for chosen in combinations(range(8), 4)]
    p = permutation_p(by_count({"vision": {0: vision}, "text": {0: text}}), 4000, seed=1)
    assert p == pytest.approx(np.mean(as_large), abs=0.03)
    assert 0.05 < p < 0.95


def test_without_a_baseline_there_is_neither_excess_nor_p():
    one = np.ones((1, 4), dtype=bool)
    tables = by_count({"vision": {0: one, 1: one}, "text": {0: one, 1: ~one}})
    metrics = head_overlap._pair_metrics(tables)
    assert metrics["heads.differ.cross"] == 0.5
    assert "heads.excess" not in metrics and "heads.differ.vision" not in metrics
    assert permutation_p(tables, 20, seed=0) is None


# How sure it is


def test_pairs_that_all_agree_are_as_sure_as_the_number_of_counts_allows():
    pairs = np.full(20, 400.0)
    assert over_counts(pairs, pairs)[1:3] == pytest.approx(
        proportion_confint(20, 20, method="wilson")
    )
    assert over_counts(0 * pairs, pairs)[1:3] == pytest.approx(
        proportion_confint(0, 20, method="wilson"), abs=1e-12
    )


def test_a_single_count_says_nothing_about_others():
    some = np.array([0.0, 3.0]), np.array([0.0, 10.0])
    assert over_counts(*some) == (0.3, 0.0, 1.0, 10)
    differ, pairs = np.array([[6.0, 1.0, 2.0]]), np.array([[10.0, 10.0, 10.0]])
    value, low, high, n = excess(differ, pairs)
    assert (value, n) == (pytest.approx(0.4), 10)
    assert low < -0.5 and high > 0.8


def test_counts_are_drawn_for_all_three_kinds_together():
    share = np.linspace(0, 1, 20)[:, None] * 100
    differ, pairs = np.repeat(share, 3, axis=1), np.full((20, 3), 100.0)
    differ[:, 0] += np.tile([1, -1], 10)  # cross follows the baselines but for one pair
    differ = differ.clip(0, 100)
    value, low, high, _ = excess(differ, pairs)
    assert -0.02 < low <= value <= high < 0.02
    apart = over_counts(differ[:, 0], pairs[:, 0])
    assert apart.high - apart.low > 0.2


def test_the_smallest_p_is_the_hypergeometrics_and_never_significant_with_four_heads():
    for n in (1, 4, 6, 7, 32):
        half = n // 2
        assert smallest_p(n) == pytest.approx(hypergeom.pmf(half, n, half, half))
    assert smallest_p(4) == pytest.approx(0.1667, abs=1e-4)


# Few examples, and what is shown


def after_json(result):
    return Result(
        *(json.loads(json.dumps(v, allow_nan=False)) for v in (result.metrics, result.data))
    )


def shown(result):
    """The table, once the figure has been drawn."""
    result = after_json(result)
    head_overlap.figure(result).savefig("/dev/null", format="png")
    plt.close("all")
    return head_overlap.table(result)


@pytest.mark.parametrize("counts", [range(4, 6), range(6, 8), [0], [3], None])
def test_few_examples_or_none_of_id_leave_out_what_they_cannot_say(counts):
    result = head_overlap.run(CONFIG, subject_of(always_three(), counts))
    table = shown(result)
    assert ("heads.left_out.text" in result.metrics) == (counts is None or min(counts) < 4)
    assert result.metrics["heads.smallest_p"] == pytest.approx(1 / 6)
    if "heads.differ.cross" not in result.metrics:
        assert table.rows[0][1:] == ["-", "-", "-"]


def test_the_table_says_when_no_overlap_could_be_significant():
    few = shown(head_overlap.run(CONFIG, subject_of(always_three())))
    assert "no overlap of heads can be significant" in few.caption and "0.17" in few.caption
    many = StackConfig(n_layers=2, n_heads=8, d_head=8, d_mlp=32)
    table = shown(head_overlap.run(CONFIG, subject_of(toy(stack=many))))
    assert "significant" not in table.caption


def test_the_figure_names_every_head_and_kind_of_pair():
    result = after_json(head_overlap.run(CONFIG, subject_of(always_three())))
    fig = head_overlap.figure(result)
    ticks = [tick.get_text() for tick in fig.axes[1].get_xticklabels()]
    assert ticks == ["0.0", "0.1", "1.0", "1.1"]
    names = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert names == ["vision, text", "vision, vision", "text, text"]
    plt.close(fig)


def test_two_runs_of_one_seed_agree():
    runs = [head_overlap.run(CONFIG, subject_of(always_three())) for _ in range(2)]
    assert runs[0].metrics == runs[1].metrics and runs[0].data == runs[1].data


@pytest.mark.parametrize("wrong", [{"samples_per_count": 0}, {"permutations": 0}])
def test_a_setting_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError, match="ask for at least 1"):
        head_overlap.run(replace(CONFIG, **wrong), subject_of(toy()))


# --- the heads needed most ----------------------------------------------------------------------


def samples_that_need(rates, seed, n=400):
    """Samples of ten counts of which each needs each of 4 x 8 heads as often as said."""
    rng = np.random.default_rng(seed)
    return Samples(np.arange(n) % 10, rng.random((n, 2, 4, 8)) < np.reshape(rates, (4, 8)))


def test_the_rate_of_a_head_is_taken_over_samples_and_digits():
    needed = np.zeros((2, 2, 1, 3), dtype=bool)
    needed[0, 0, 0, 1] = needed[1, :, 0, 2] = True
    assert rate(needed).tolist() == [0, 0.25, 0.5]


def test_groups_that_need_the_same_heads_agree_on_them_and_others_do_not():
    one = np.where(np.arange(32) < 8, 0.8, 0.05)
    same = top_metrics(
        {"vision": samples_that_need(one, 0), "text": samples_that_need(one, 1)}, seed=0
    )
    assert same["heads.top.n"] == 8
    assert same["heads.top.cross"] == same["heads.top.vision"] == same["heads.top.text"] == 1.0
    assert same["heads.top.excess"] == 0.0
    assert same["heads.top.cross.p"] == pytest.approx(hypergeom.pmf(8, 32, 8, 8))
    assert same["heads.top.smallest_p"] == pytest.approx(1 / comb(32, 8))
    other = {"vision": samples_that_need(one, 0), "text": samples_that_need(one[::-1], 1)}
    apart = top_metrics(other, seed=0)
    assert apart["heads.top.cross"] == 0.0 and apart["heads.top.excess"] == 1.0
    assert apart["heads.top.cross.p"] == 1.0


def test_halves_of_one_modality_have_no_sample_in_common():
    # eight samples that need heads by coin toss: halves agree on a quarter of the top quarter
    found = [
        top_metrics({m: samples_that_need(np.full(32, 0.5), 2 * i + j, n=8)
                     for j, m in enumerate(("vision", "text"))}, seed=i)
        for i in range(12)
    ]  # fmt: skip
    for kind in ("cross", "vision", "text"):
        mean = np.mean([metrics[f"heads.top.{kind}"] for metrics in found])
        assert mean == pytest.approx(0.25, abs=0.08), kind


def test_ties_are_no_agreement():
    # 16 heads are always needed, in both: any 8 of them are as good, by chance 4 are the same
    tied = samples_that_need(np.where(np.arange(32) < 16, 1.0, 0.0), 0)
    metrics = top_metrics({"vision": tied, "text": tied}, seed=0)
    assert metrics["heads.top.cross"] == pytest.approx(0.5, abs=0.05)
    mean = sum(hypergeom.pmf(k, 16, 8, 8) * overlap_p(k, 8, 32) for k in range(9))
    assert metrics["heads.top.cross.p"] == pytest.approx(mean, abs=0.05)


def test_heads_that_nobody_needs_are_not_taken_for_agreement():
    few = np.where(np.arange(32) < 3, 0.5, 0.0)
    both = {"vision": samples_that_need(few, 0), "text": samples_that_need(few[::-1], 1)}
    metrics = top_metrics(both, seed=0)
    assert metrics["heads.top.n"] == 3 and metrics["heads.top.cross"] == 0.0
    nothing = samples_that_need(np.zeros(32), 0)
    assert top_metrics({"vision": nothing, "text": nothing}, seed=0) == {}
    assert top_metrics({"vision": nothing}, seed=0) == {}


def test_agreement_by_chance_has_the_hypergeometric_p():
    counted = [
        len(set(a) & set(range(2)))
        for a in combinations(range(6), 2)  # all pairs of six heads against a fixed pair
    ]
    assert overlap_p(1, 2, 6) == pytest.approx(np.mean(np.array(counted) >= 1))
    assert overlap_p(0, 2, 6) == 1.0


def test_needing_the_same_block_is_not_needing_the_same_heads():
    seven, other = set(range(7)), set(range(1, 8))  # of the eight heads of block 0, among 32
    assert overlap_p(6, 7, 32) < 1e-3
    assert overlap_p_within(seven, other, 32, 8) == pytest.approx(1.0)  # 7 + 7 - 8 must be shared
    assert overlap_p_within({0, 8}, {0, 8}, 16, 8) == pytest.approx(1 / 64)
    assert overlap_p_within({0, 1}, {0, 1}, 4, 4) == pytest.approx(overlap_p(2, 2, 4))


def test_the_chance_within_blocks_is_that_of_drawing_heads_anew():
    rng, a, b = np.random.default_rng(0), {0, 1, 2, 9}, {1, 2, 5, 8, 9}
    draws = []
    for _ in range(4000):
        first, second = rng.permutation(8), 8 + rng.permutation(8)
        draws.append(len(({*first[:3], second[0]}) & b))
    seen = np.mean(np.array(draws) >= len(a & b))
    assert overlap_p_within(a, b, 16, 8) == pytest.approx(seen, abs=0.03)
