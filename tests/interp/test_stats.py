"""Intervals against published numbers, statsmodels, scipy's bootstrap and simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.proportion import confint_proportions_2indep

from interp.errors import InputError
from interp.stats import (
    bootstrap_mean,
    bootstrap_ratio,
    difference,
    mcnemar,
    proportion,
    wilson,
)


def test_the_interval_of_twenty_of_twenty_does_not_collapse():
    interval = wilson(20, 20)
    assert interval.low == pytest.approx(0.8389, abs=5e-5)
    assert interval.value == interval.high == 1
    assert interval.n == 20


def test_the_interval_of_ten_of_twenty_is_symmetric():
    assert wilson(10, 20) == pytest.approx((0.5, 0.2993, 0.7007, 20), abs=5e-5)


def test_the_share_of_none_starts_at_zero():
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3: 0 of 20
    assert wilson(0, 20) == pytest.approx((0, 0, 0.1611, 20), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_lies_in_its_interval_and_failures_mirror_successes(case):
    k, n = case
    interval, mirror = wilson(k, n), wilson(n - k, n)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirror.high, abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5), (0, -1)])
def test_impossible_shares_are_refused(k, n):
    with pytest.raises(InputError):
        wilson(k, n)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_that_is_no_probability_is_refused(confidence):
    with pytest.raises(InputError, match="between 0 and 1"):
        wilson(1, 2, confidence)
    with pytest.raises(InputError, match="between 0 and 1"):
        bootstrap_mean(np.arange(3.0), confidence=confidence)


def test_a_boolean_vector_counts_its_true_entries():
    assert proportion(np.arange(20) < 10) == wilson(10, 20)
    with pytest.raises(InputError, match="0 examples"):
        proportion(np.zeros(0, bool))


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_differences_have_the_published_intervals(a, b, low, high):
    interval = difference(*a, *b)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert interval.value == pytest.approx(a[0] / a[1] - b[0] / b[1])
    assert interval.n == a[1] + b[1]


@settings(deadline=None)
@given(st.tuples(*[st.tuples(st.integers(0, 40), st.integers(1, 40))] * 2))
def test_differences_agree_with_statsmodels(cases):
    (a, extra_a), (b, extra_b) = cases
    interval = difference(a, a + extra_a, b, b + extra_b)
    theirs = confint_proportions_2indep(a, a + extra_a, b, b + extra_b, method="newcomb")
    assert (interval.low, interval.high) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize(
    ("b", "c", "p"), [(1, 8, 0.0390625), (0, 6, 0.03125), (5, 5, 1.0), (0, 0, 1.0)]
)
def test_mcnemar_is_exact_and_one_without_disagreement(b, c, p):
    assert mcnemar(b, c) == mcnemar(c, b) == p


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_agrees_with_statsmodels(b, c):
    theirs = statsmodels_mcnemar([[0, b], [c, 0]], exact=True).pvalue if b + c else 1.0
    assert mcnemar(b, c) == pytest.approx(min(theirs, 1.0), rel=1e-9)


def test_mcnemar_refuses_less_than_no_items():
    with pytest.raises(InputError, match="below 0"):
        mcnemar(-1, 3)


def test_the_bootstrap_of_a_mean_agrees_with_scipy():
    values = np.random.default_rng(0).exponential(size=80)
    ours = bootstrap_mean(values, n_resamples=20_000)
    theirs = bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert ours.value == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx(theirs, abs=0.01)
    assert ours.n == 80


def test_the_bootstrap_is_fixed_by_its_seed_and_moves_with_it():
    values = np.random.default_rng(0).normal(size=30)
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3).low != bootstrap_mean(values, seed=4).low


def test_many_values_are_drawn_in_blocks_with_the_same_meaning():
    values = np.random.default_rng(0).normal(size=300_000)
    interval = bootstrap_mean(values, n_resamples=100)
    half = 1.96 / np.sqrt(len(values))
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.25)


@pytest.mark.parametrize("n_groups", [None, 1, 7])
def test_a_constant_sample_has_an_interval_of_no_width(n_groups):
    values = np.full(23, 0.1)
    groups = None if n_groups is None else np.arange(23) % n_groups
    assert bootstrap_mean(values, groups=groups) == (0.1, 0.1, 0.1, 23)


def test_groups_whose_values_agree_count_once():
    by_group = np.random.default_rng(0).normal(size=12)
    copies = np.repeat(by_group, 50)
    grouped = bootstrap_mean(copies, groups=np.repeat(np.arange(12), 50), n_resamples=4000)
    alone = bootstrap_mean(by_group, n_resamples=4000)
    blind = bootstrap_mean(copies, n_resamples=4000)
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high), abs=1e-9)
    assert grouped.n == 600
    assert (grouped.high - grouped.low) > 5 * (blind.high - blind.low)


def test_group_labels_may_be_words_in_any_order():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    words = np.array(["b", "a", "b", "c", "a", "c"])
    numbers = np.array([1, 0, 1, 2, 0, 2])
    assert bootstrap_mean(values, groups=words) == bootstrap_mean(values, groups=numbers)


def test_the_values_of_a_single_group_are_drawn():
    values = np.random.default_rng(0).normal(size=40)
    assert bootstrap_mean(values, groups=np.zeros(40, int)) == bootstrap_mean(values)


def test_the_cluster_bootstrap_covers_the_true_mean_where_the_blind_one_does_not():
    rng, grouped_hits, blind_hits = np.random.default_rng(0), 0, 0
    groups = np.repeat(np.arange(30), 10)
    for seed in range(200):
        values = np.repeat(rng.normal(size=30), 10) + rng.normal(size=300)  # true mean 0
        grouped = bootstrap_mean(values, groups=groups, n_resamples=400, seed=seed)
        blind = bootstrap_mean(values, n_resamples=400, seed=seed)
        grouped_hits += grouped.low <= 0 <= grouped.high
        blind_hits += blind.low <= 0 <= blind.high
    assert grouped_hits >= 0.88 * 200
    assert blind_hits <= 0.70 * 200


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_by_their_place(bad):
    with pytest.raises(InputError, match="entry 1 is"):
        bootstrap_mean(np.array([0.0, bad]))
    with pytest.raises(InputError, match="numerators must be finite: entry 0"):
        bootstrap_ratio(np.array([bad]), np.array([1]))


def test_means_without_values_or_with_other_labels_are_refused():
    with pytest.raises(InputError, match="0 values"):
        bootstrap_mean(np.zeros(0))
    with pytest.raises(InputError, match="3 values and 2 group labels"):
        bootstrap_mean(np.zeros(3), groups=np.zeros(2))
    with pytest.raises(InputError, match="resamples"):
        bootstrap_mean(np.zeros(3), n_resamples=0)
    with pytest.raises(InputError, match="numbers"):
        bootstrap_mean(np.array(["a"]))


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios():
    interval = bootstrap_ratio(np.array([1, 1]), np.array([1, 99]))
    assert interval == (0.02, 1 / 99, 1.0, 100)  # both ends: one group drawn twice


def test_a_ratio_of_groups_equals_the_mean_over_their_values():
    rng = np.random.default_rng(0)
    groups, correct = rng.integers(9, size=200), rng.random(200) < 0.4
    hits, totals = np.bincount(groups, correct), np.bincount(groups)
    assert bootstrap_ratio(hits, totals) == pytest.approx(
        bootstrap_mean(correct, groups=groups), abs=1e-12
    )


def test_groups_without_examples_change_nothing():
    with_empty = bootstrap_ratio(np.array([3, 0, 1, 0]), np.array([4, 0, 5, 0]))
    assert with_empty == bootstrap_ratio(np.array([3, 1]), np.array([4, 5]))


@pytest.mark.parametrize(
    ("top", "bottom", "message"),
    [
        ([0, 0], [0, 0], "all denominators are 0"),
        ([], [], "all denominators are 0"),
        ([1, 0], [0, 2], "0 examples"),
        ([1, 0], [-1, 2], "not below 0"),
        ([1, 0], [0.5, 2], "whole"),
        ([1, 0, 1], [1, 2], "3 numerators and 2 denominators"),
    ],
)
def test_ratios_without_a_meaning_are_refused(top, bottom, message):
    with pytest.raises(InputError, match=message):
        bootstrap_ratio(np.array(top, float), np.array(bottom, float))
