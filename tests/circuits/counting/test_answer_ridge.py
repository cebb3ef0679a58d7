"""Ridges at the answer: planted numbers, the same from scikit-learn and SciPy, and no leak."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from statsmodels.stats.proportion import proportion_confint

from circuits.counting import answer_ridge
from circuits.counting.answer_ridge import Config
from circuits.counting.answer_stream import Items, activations, first_digits, fit_items
from circuits.counting.boards import BLACK, World, split_of
from circuits.counting.examples import make_examples
from circuits.counting.questions import MODALITIES, Asker, number_of_c
from circuits.counting.ridge import PENALTIES, fit_ridge, folds, read_out_scores, spearman
from circuits.counting.subject import Subject, encoder_output
from circuits.runs import Result
from interp.errors import InputError

CONFIG = Config(fit_per_count=6)
DRAWN = {"per_count": 6, "seed": 0}  # as CONFIG says
TINY = Config(model="tiny", weights_seed=0, per_count=4, fit_per_count=10)
ENDS = ("", ".low", ".high", ".n")


@pytest.fixture(scope="module")
def result(small_subject):
    return answer_ridge.run(CONFIG, small_subject)


@pytest.fixture(scope="module")
def tiny():
    return answer_ridge.run(TINY)


def of_examples(subject, **changes):
    """The subject with other examples, or another model."""
    parts = {name: getattr(subject, name) for name in ("number", "truth", "untrained", "world")}
    return Subject(**{**parts, "examples": subject.examples, **changes})


def written(result):
    """A result as it comes back from a run folder."""
    return Result(*json.loads(json.dumps([result.metrics, result.data], allow_nan=False)))


def counts_and_noise(first, last, *, seed, width=40, each=20):
    counts = np.repeat(np.arange(first, last + 1), each)
    return counts, 0.02 * np.random.default_rng(seed).normal(size=(len(counts), width))


# --- planted numbers ----------------------------------------------------------------------------


def test_a_count_that_lies_on_a_line_is_read_exactly_beyond_the_counts_that_were_fitted():
    (seen, x), (unseen, z) = (counts_and_noise(*ends, seed=i) for i, ends in
                              enumerate([(0, 19), (20, 39)]))  # fmt: skip
    line = np.random.default_rng(9).normal(size=40)
    ridge = fit_ridge(x + seen[:, None] * line, seen)
    scores = read_out_scores(ridge(z + unseen[:, None] * line), unseen)
    assert scores[""].value == 1 and scores[""].n == 400
    assert scores[".spearman"].value > 0.99 and scores[".error"].value < 0.1


def test_a_count_that_is_only_looked_up_is_read_in_id_and_not_beyond():
    (seen, x), (unseen, z) = (counts_and_noise(*ends, seed=i) for i, ends in
                              enumerate([(0, 19), (20, 39)]))  # fmt: skip
    own = np.linalg.qr(np.random.default_rng(9).normal(size=(40, 40)))[0]  # a direction a count
    ridge = fit_ridge(x + own[seen], seen, between=True)
    beyond = read_out_scores(ridge(z + own[unseen]), unseen)
    assert beyond[""].value <= 0.05 and beyond[".error"].value > 5
    both = np.concatenate([seen, unseen])
    ceiling = fit_ridge(np.concatenate([x, z]) + own[both], both, between=True)
    assert ceiling.left_out > 50  # no direction of a count left out is known


def test_what_only_rounding_varies_has_no_weight():
    counts, x = counts_and_noise(0, 9, seed=0, width=3)
    x[:, 0] += counts
    x[:, 2] = 5 + np.random.default_rng(1).choice([0, 5e-7], len(x))
    ridge = fit_ridge(x, counts)
    assert ridge.weight[2] == 0 and ridge(x + [0, 0, 9]) == pytest.approx(ridge(x))


# --- against scikit-learn and SciPy -------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("noise", [0.1, 3.0, 30.0])
def test_penalty_and_read_out_are_those_of_a_grid_search_over_scaler_and_ridge(noise, between):
    rng, counts = np.random.default_rng(3), np.repeat(np.arange(13), 7)
    x = (counts[:, None] * rng.normal(size=9) + noise * rng.normal(size=(91, 9))) * rng.uniform(
        0.1, 50, 9
    )
    search = GridSearchCV(
        make_pipeline(StandardScaler(), Ridge(solver="svd")),
        {"ridge__alpha": PENALTIES},
        cv=folds(counts, between=between),
        scoring="neg_mean_squared_error",
    ).fit(x, counts)
    ridge = fit_ridge(x, counts, between=between)
    assert ridge.penalty == search.best_params_["ridge__alpha"]
    assert ridge.left_out == pytest.approx(-search.best_score_)
    new = rng.normal(size=(30, 9)) * 20
    assert ridge(new) == pytest.approx(search.predict(new), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("decimals", [0, 6])  # many ties, and none
def test_rank_correlation_and_its_interval_are_scipys_on_drawn_counts(decimals):
    rng, counts = np.random.default_rng(0), np.repeat(np.arange(8), [3, 5, 2, 4, 4, 1, 6, 3])
    values = np.round(counts + 4 * rng.normal(size=len(counts)), decimals)
    found = spearman(values, counts, seed=7)
    places = [np.flatnonzero(counts == count) for count in range(8)]
    drawn = np.random.default_rng(7).multinomial(8, np.full(8, 1 / 8), size=1000)
    rows = [np.concatenate([np.tile(p, n) for p, n in zip(places, row, strict=True)])
            for row in drawn]  # fmt: skip
    want = [spearmanr(values[own.astype(int)], counts[own.astype(int)])[0] for own in rows]
    assert found.value == pytest.approx(spearmanr(values, counts)[0])
    assert [found.low, found.high] == pytest.approx(np.quantile(want, [0.025, 0.975]).tolist())


def test_one_count_or_one_read_out_has_no_rank_correlation():
    assert spearman(np.array([1.0, 2.0]), np.array([3, 3])) is None
    assert spearman(np.array([2.0, 2.0]), np.array([3, 4])) is None
    assert ".spearman" not in read_out_scores(np.array([1.0, 2.0]), np.array([3, 3]))


def test_two_counts_alone_have_an_interval_though_half_of_the_draws_have_none():
    found = spearman(np.array([1.0, 2.0, 5.0, 6.0]), np.array([0, 0, 1, 1]))
    assert 0.8 < found.low <= found.value <= found.high <= 1


def test_a_read_out_is_exact_when_it_rounds_to_the_count_and_its_error_is_not_rounded():
    values, counts = np.array([2.4, 2.6, -7.0, 1e9]), np.array([2, 2, 0, 4])
    scores = read_out_scores(values, counts)
    low, high = proportion_confint(1, 4, method="wilson")
    assert scores[""] == pytest.approx((0.25, low, high, 4))
    assert scores[".error"].value == pytest.approx((0.4 + 0.6 + 7 + 1e9 - 4) / 4)


# --- folds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("n_counts", [2, 3, 5, 20, 41])
def test_no_count_is_both_fitted_and_left_out_and_every_item_is_left_out_once(n_counts, between):
    counts = np.random.default_rng(0).permutation(np.repeat(np.arange(n_counts), 4))
    parts = folds(counts, between=between)
    assert len(parts) == min(5, n_counts)
    for fitted, left in parts:
        assert not set(counts[fitted]) & set(counts[left])
        assert len(fitted) + len(left) == len(counts) and len(fitted)
    assert sorted(np.concatenate([left for _, left in parts])) == list(range(len(counts)))


def test_blocks_left_out_are_of_neighbours_and_between_them_none_are():
    counts = np.arange(20)
    assert [left.tolist() for _, left in folds(counts)][-1] == [16, 17, 18, 19]
    assert [left.tolist() for _, left in folds(counts, between=True)][-1] == [4, 9, 14, 19]


def test_one_count_cannot_be_fitted():
    with pytest.raises(InputError, match=r"two counts or more; these are \[3\]"):
        folds(np.array([3, 3, 3]))


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", MODALITIES)
def test_ridges_are_fitted_on_items_of_the_training_split_in_equal_parts(small_subject, modality):
    cells, counts = fit_items(small_subject, modality, **DRAWN)
    black = (cells == BLACK).sum((1, 2)) if modality == "vision" else number_of_c(cells)
    assert np.array_equal(black, counts)
    assert {split_of(own) for own in cells} == {"train"}
    assert np.bincount(counts).tolist() == [6] * (small_subject.world.text_max + 1)


@pytest.mark.parametrize("modality", MODALITIES)
def test_no_test_example_is_fitted_on_even_where_those_are_of_the_training_split(
    small_subject, modality
):
    boards = fit_items(small_subject, "vision", **DRAWN)
    strings = fit_items(small_subject, "text", **DRAWN)
    made = make_examples(small_subject.world, per_count=3, seed=1, counts=range(7))
    half = replace(made, boards=boards.cells[::2], strings=strings.cells[::2])
    found = fit_items(of_examples(small_subject, examples=half), modality, **DRAWN)
    before = boards if modality == "vision" else strings
    tests = {own.tobytes() for own in before.cells[::2]}
    left = {own.tobytes() for own in found.cells}
    assert left == {own.tobytes() for own in before.cells} - tests and left


def test_other_seeds_draw_other_items(small_subject):
    first, again = (fit_items(small_subject, "text", **DRAWN).cells for _ in range(2))
    other = fit_items(small_subject, "text", per_count=6, seed=1).cells
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_digit_that_is_forced_is_the_first_of_the_right_answer(small_subject):
    asker = Asker(small_subject.number)
    forced = first_digits(asker, np.array([0, 7, 120, 12, 99, 100]))
    assert small_subject.number.decode(forced) == ["0", "0", "1", "1", "9", "1"]


@pytest.mark.parametrize("modality", MODALITIES)
def test_activations_are_those_of_the_rendered_question_with_its_first_digit(
    small_subject, modality
):
    model, counts = small_subject.number, small_subject.examples.counts[::5]
    items = Items(small_subject.items(modality)[::5], counts)
    seen, asker = activations(model, modality, items), Asker(model)
    prompts = [asker.prompt("number", modality, own) for own in items.cells]
    batch = model.encode(prompts).extend(first_digits(asker, counts))
    sites = ["blocks.0.resid_post", "blocks.1.resid_post"]
    cache = model.run(batch, cache=sites).cache
    for layer, site in enumerate(sites):
        want = cache[site][:, batch.layout.n_prompt - 1 :].numpy()
        assert seen.answer[:, layer] == pytest.approx(want, abs=1e-5)
    if modality == "vision":
        want = encoder_output(model, items.cells).mean(1).numpy()
        assert seen.encoder == pytest.approx(want, abs=1e-6)
    else:
        assert seen.encoder is None


def test_the_forced_digit_reaches_position_1_alone(small_subject):
    strings = small_subject.items("text")[:2]
    one, other = (
        activations(small_subject.number, "text", Items(strings, np.array(counts))).answer
        for counts in ([0, 0], [50, 50])
    )
    assert np.array_equal(one[:, :, 0], other[:, :, 0])
    assert not np.allclose(one[:, :, 1], other[:, :, 1])


# --- the result ---------------------------------------------------------------------------------


def stems(n_layers):
    places = [f"block_{i}{at}" for i in range(n_layers) for at in ("", ".position_1")]
    found = [f"{a}_to_{b}.{p}" for a in MODALITIES for b in MODALITIES for p in places]
    for own in ("vision_to_vision", "text_to_text"):
        found += [f"{own}.all.{place}" for place in places]
        found += [f"untrained.{own}.block_{i}" for i in range(n_layers)]
    return [*found, "encoder", "encoder.untrained", "first_digit"]


def test_every_number_has_its_interval_and_its_number_of_examples(tiny):
    keys = [f"answer_ridge.{stem}.{regime}{what}" for stem in stems(2)
            for regime in ("id", "ve", "fe") for what in ("", ".error", ".spearman")]  # fmt: skip
    undefined = {"answer_ridge.first_digit.fe.spearman"}  # 40 to 49 have one first digit
    assert set(tiny.metrics) == {key + end for key in set(keys) - undefined for end in ENDS}
    for key in set(keys) - undefined:
        low, value, high, n = (tiny.metrics[key + end] for end in (".low", "", ".high", ".n"))
        assert low <= value <= high and n == 4 * (10 if ".fe" in key else 20)


def test_within_id_the_count_is_read_and_crossing_the_modalities_it_is_not(tiny):
    for own in ("vision_to_vision", "text_to_text"):
        assert tiny.metrics[f"answer_ridge.{own}.block_0.id"] >= 0.9
    for crossed in ("vision_to_text", "text_to_vision"):
        assert tiny.metrics[f"answer_ridge.{crossed}.block_0.id"] <= 0.5


def test_a_ridge_that_was_fitted_on_ve_too_reads_ve_no_worse_than_one_that_was_not(tiny):
    for place in ("block_0", "block_1", "block_0.position_1", "block_1.position_1"):
        for own in ("vision_to_vision", "text_to_text"):
            ceiling = tiny.metrics[f"answer_ridge.{own}.all.{place}.ve.high"]
            assert ceiling >= tiny.metrics[f"answer_ridge.{own}.{place}.ve.low"]
    for own in ("vision_to_vision", "text_to_text"):
        assert tiny.metrics[f"answer_ridge.{own}.all.block_0.ve"] >= 0.85


def test_the_first_digit_alone_is_right_once_in_ten_and_two_and_a_half_off(tiny):
    """10 d + 4.5, from the counts 0 to 19."""
    for regime in ("id", "ve", "fe"):
        key = f"answer_ridge.first_digit.{regime}"
        assert tiny.metrics[key] == 0.1 and tiny.metrics[f"{key}.error"] == pytest.approx(2.5)


@pytest.mark.parametrize("top, stem", [(3, "text_to_vision."), (6, "vision_to_vision.all.")])
def test_a_read_out_is_that_of_a_ridge_on_items_up_to_the_last_count_of_id_or_of_ve(
    small_subject, result, top, stem
):
    model, fitted = small_subject.number, stem.split("_to_")[0]
    cells, counts = fit_items(small_subject, fitted, **DRAWN)
    few = counts <= top
    x = activations(model, fitted, Items(cells[few], counts[few])).answer[:, 1, 1]
    ridge = fit_ridge(x, counts[few], between="all" in stem)
    examples = small_subject.examples
    read = ridge(
        activations(model, "vision", Items(examples.boards, examples.counts)).answer[:, 1, 1]
    )
    for regime, own in small_subject.regimes.items():
        error = np.abs(read - examples.counts)[own].mean()
        key = f"answer_ridge.{stem}block_1.position_1.{regime}"
        assert result.metrics[f"{key}.error"] == pytest.approx(error)
        assert result.metrics[key] == np.mean(np.rint(read)[own] == examples.counts[own])


def test_the_untrained_control_is_what_the_untrained_model_would_give_as_the_model(
    small_subject, result
):
    swapped = of_examples(small_subject, number=small_subject.untrained)
    found = answer_ridge.run(CONFIG, swapped).metrics
    for key, value in result.metrics.items():
        if key.startswith("answer_ridge.untrained."):
            assert found[key.replace("untrained.", "")] == value
        if key.startswith("answer_ridge.encoder.untrained."):
            assert found[key.replace("untrained.", "")] == value


def test_of_many_examples_of_a_count_the_first_are_read(small_subject, result):
    found = answer_ridge.run(replace(CONFIG, items_per_count=2), small_subject)
    counts = small_subject.examples.counts
    first = np.concatenate([np.flatnonzero(counts == n)[:2] for n in np.unique(counts)])
    few = of_examples(small_subject, examples=small_subject.examples.select(first))
    assert found.metrics["answer_ridge.text_to_text.block_0.ve.n"] == 6
    assert found == answer_ridge.run(CONFIG, few) and found != result


def test_two_runs_are_equal(small_subject, result):
    assert answer_ridge.run(CONFIG, small_subject) == result


@pytest.mark.parametrize("counts", [range(4), (5,), (8, 10), (0,)])
def test_regimes_without_examples_are_absent_and_one_example_is_enough(small_subject, counts):
    examples = make_examples(small_subject.world, per_count=1, seed=0, counts=counts)
    subject = of_examples(small_subject, examples=examples)
    result = written(answer_ridge.run(CONFIG, subject))
    regimes = {small_subject.world.regime_of(count) for count in counts}
    ends = (".n", ".error", ".spearman")
    bare = [key.removesuffix(".n") for key in result.metrics if key.endswith(".n")]
    assert {k.split(".")[-1] for k in bare if not k.endswith(ends)} == regimes
    assert any(key.endswith(".spearman") for key in bare) == (len(counts) > 1)
    table = answer_ridge.table(result)
    assert len(table.columns) == 2 + 2 * len(regimes)
    plt.close(answer_ridge.figure(result))


def test_the_figure_draws_the_mean_read_outs_and_the_exact_shares(tiny):
    fig = answer_ridge.figure(written(tiny))
    for i, read in enumerate(MODALITIES):
        lines = {line.get_label(): line for line in fig.axes[i].lines}
        for fitted in MODALITIES:
            rows = tiny.data["read"][f"{fitted}_to_{read}"]
            drawn = lines[f"fitted on {fitted}, ID"].get_ydata().tolist()
            assert drawn == [row["mean"] for row in rows] and len(rows) == 50
        assert {text.get_text() for text in fig.axes[i].texts} == {"ID", "VE", "FE"}
    shares = [box.lines[0].get_ydata().tolist() for box in fig.axes[2].containers]
    stems = ("vision_to_vision", "text_to_vision", "vision_to_vision.all",
             "untrained.vision_to_vision")  # fmt: skip
    assert shares == [
        [tiny.metrics[f"answer_ridge.{stem}.block_{i}.ve"] for i in (0, 1)] for stem in stems
    ]
    plt.close(fig)


def test_the_table_has_a_row_for_each_direction_and_block_and_for_each_control(tiny):
    table = answer_ridge.table(written(tiny))
    assert [row[0] for row in table.rows[:8:2]] == [
        "vision to vision", "vision to text", "text to vision", "text to text",
    ]  # fmt: skip
    assert len(table.rows) == 8 + 4 + 4 + 2 and len(table.columns) == 2 + 6
    assert "no sign of a fracture" in table.caption


@pytest.mark.parametrize("number", [1, 0, -3])
def test_fewer_than_two_items_a_count_are_refused(small_subject, number):
    with pytest.raises(InputError, match=f"fit_per_count is {number}"):
        answer_ridge.run(Config(fit_per_count=number), small_subject)


def test_no_test_examples_to_read_are_refused(small_subject):
    with pytest.raises(InputError, match="items_per_count is 0"):
        answer_ridge.run(Config(items_per_count=0), small_subject)


def test_a_world_of_two_id_counts_is_refused(small_subject):
    world = World(size=4, spread=2, vision_max=1, text_max=6, further=(8, 10))
    with pytest.raises(InputError, match=r"2 ID counts \(vision\) are left to fit"):
        answer_ridge.run(CONFIG, of_examples(small_subject, world=world))


def test_more_cells_than_one_call_may_ask_for_are_refused(small_subject):
    with pytest.raises(InputError, match="at most 10,000,000 at once"):
        answer_ridge.run(Config(fit_per_count=100_000), small_subject)
