"""Masking: what is hidden, what is right then, and a hand-made counter that follows every mask."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from statsmodels.stats.proportion import proportion_confint

from circuits.counting import masking
from circuits.counting.boards import BLACK, EMPTY, WHITE, C, World, cell_patches
from circuits.counting.examples import make_examples
from circuits.counting.hidden_number import called_kinds, fit_probe
from circuits.counting.masking import KINDS, Config, mask_of, select
from circuits.counting.questions import Asker, vocabulary
from circuits.counting.subject import Subject
from circuits.runs import Result
from interp.errors import InputError
from interp.toy import StackConfig, ToyConfig, ToyVLM

WORLD = World(size=4, spread=2, vision_max=5, text_max=8, further=(9, 10))
STACK = StackConfig(n_layers=1, n_heads=1, d_model=32, d_head=4, d_mlp=4)
CONFIG = Config(probe_boards=60, most=2)

COUNTED, OTHER, ASKED, TENS, UNITS, AMOUNT, BARE = range(0, 14, 2)  # a word is +1 here, -1 beside
TOKENS = 30.5  # read when the units are named: 30 with a picture, 31 with a string


def random_model(seed=1):
    return ToyVLM(ToyConfig(vocabulary(), grid=4, decoder=STACK, tower=STACK), seed=seed)


@torch.no_grad()
def counter(names=None):
    """A model that answers the number of black stones, or of c, by construction, from 1 to 9.

    One head attends to everything alike; its value is 1 at black patches and at c, so it writes the
    share of them among the tokens that are read: 0.01 for one of `TOKENS`. The answer is "0", then
    the digit d with the largest 2 d N - d^2, which is the one nearest to N, then the end. With
    `names` it answers that number whatever it sees.
    """
    vlm = random_model()
    raw, word = vlm.raw, vlm.tokenizer.id
    for parameter in raw.parameters():
        parameter.zero_()
    for norm in raw.modules():
        if type(norm).__name__ == "LayerNorm":
            norm.w.fill_(1.0)

    def put(row, place, sign=1.0):
        row.zero_()
        row[place], row[place + 1] = sign, -sign  # normalised, this is 4 and -4

    for row in raw.W_E:
        put(row, OTHER)
    put(raw.W_E[word("c")], COUNTED)
    put(raw.W_E[word("letters")], COUNTED, -1.0)  # the question about strings has a c of its own
    put(raw.W_E[word("?")], ASKED)
    for digit in vlm.tokenizer.digits:
        put(raw.W_E[digit], UNITS)
    put(raw.W_E[vlm.tokenizer.digits[0]], TENS)

    target = torch.zeros(3, 32)
    for kind, place in ((BLACK, COUNTED), (WHITE, OTHER), (EMPTY, BARE)):
        put(target[kind], place)
    planes = torch.from_numpy(cell_patches().copy()).permute(0, 3, 1, 2).flatten(1)
    raw.vision.W_patch.copy_(torch.linalg.pinv(planes / 127.5 - 1) @ target)
    for place in (COUNTED, OTHER):
        for i in (place, place + 1):
            raw.projector.weight[i, i] = 0.25
    for i in (0, 1):
        raw.projector.weight[OTHER + i, BARE + i] = 0.25

    attention, unembed = raw.blocks[0].attn, raw.unembed.W_U
    attention.W_V[0, COUNTED, 0] = 0.25
    attention.W_O[0, 0, AMOUNT], attention.W_O[0, 0, AMOUNT + 1] = 0.01 * TOKENS, -0.01 * TOKENS
    unembed[ASKED, vlm.tokenizer.digits[0]] = 1e4
    unembed[UNITS, vlm.tokenizer.eos] = 1e4
    for d, digit in enumerate(vlm.tokenizer.digits):
        unembed[TENS, digit] = 100 - d**2 / 4
        unembed[AMOUNT, digit] = 50 * d
        if names is not None:
            unembed[TENS, digit], unembed[AMOUNT, digit] = 1e4 * (d == names), 0
    return vlm


def subject_of(number, *, per_count=12, counts=None):
    examples = make_examples(WORLD, per_count=per_count, seed=0, counts=counts)
    return Subject(number, random_model(2), random_model(3), WORLD, examples)


@pytest.fixture(scope="module")
def counting():
    """The counter and examples of ID counts from which two can be hidden."""
    return subject_of(counter(), counts=(3, 4, 5))


@pytest.fixture(scope="module")
def result(counting):
    return masking.run(CONFIG, counting)


@pytest.fixture(scope="module")
def stubborn():
    """A model that says 3 whatever it sees."""
    return subject_of(counter(names=3), per_count=8)


def written(result):
    """A result as it comes back from a run folder."""
    return Result(*json.loads(json.dumps([result.metrics, result.data], allow_nan=False)))


# --- planted truth ------------------------------------------------------------------------------


def test_the_hand_made_counter_counts():
    subject = subject_of(counter())
    for modality in ("vision", "text"):
        answers, counts = subject.answers(modality), subject.examples.counts
        named = (counts >= 1) & (counts <= 9)
        assert np.array_equal(answers[named], counts[named])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "key", [f"{modality}.{kind}" for modality, kinds in KINDS.items() for kind in kinds]
)
def test_a_model_that_counts_is_right_whatever_is_hidden(result, key, k):
    name = "boards" if key.startswith("vision") else "strings"
    n = result.metrics[f"masking.{key.split('.')[0]}.{name}"]
    low, _ = proportion_confint(n, n, method="wilson")
    for end in ("", ".digits"):
        assert result.metrics[f"masking.{key}.k{k}{end}"] == 1
        assert result.metrics[f"masking.{key}.k{k}{end}.low"] == pytest.approx(low)
        assert result.metrics[f"masking.{key}.k{k}{end}.n"] == n > 20


def test_its_answers_fall_by_what_was_counted_and_hidden(result):
    for k in (1, 2):
        for kind in ("vision.black", "text.c"):
            assert result.metrics[f"masking.{kind}.shift.k{k}"] == -k
        for kind in ("vision.white", "vision.empty", "text.other"):
            assert result.metrics[f"masking.{kind}.shift.k{k}"] == 0
        assert -k < result.metrics[f"masking.vision.random.shift.k{k}"] < 0


def test_a_model_that_always_says_one_number_is_right_only_where_nothing_should_change(stubborn):
    metrics = masking.run(CONFIG, stubborn).metrics
    chosen, _ = select(CONFIG, stubborn, "vision")
    for k in (1, 2):
        assert metrics[f"masking.vision.black.k{k}"] == 0
        assert metrics[f"masking.vision.white.k{k}"] == metrics[f"masking.vision.empty.k{k}"] == 1
        assert metrics[f"masking.vision.black.shift.k{k}"] == 0
        hidden = chosen.orders["random"][:, :k]
        boards = chosen.items.reshape(len(chosen.items), -1)
        none = [BLACK not in board[cells] for board, cells in zip(boards, hidden, strict=True)]
        assert metrics[f"masking.vision.random.k{k}"] == pytest.approx(np.mean(none))
        assert metrics[f"masking.text.c.k{k}"] == 0 and metrics[f"masking.text.other.k{k}"] == 1


def test_free_answers_that_are_no_number_are_wrong_and_those_held_to_digits_may_be_right():
    """The counter, saying "0 a" for "0 2", which is at three stones with one of them hidden."""
    vlm = counter()
    a, two, weights = vlm.tokenizer.id("a"), vlm.tokenizer.digits[2], vlm.raw.unembed.W_U
    weights[:, a] = weights[:, two]
    weights[TENS, a] += 0.1
    subject = subject_of(vlm, per_count=6, counts=(3, 4))
    found = masking.run(replace(CONFIG, most=1), subject).metrics
    chosen, _ = select(replace(CONFIG, most=1), subject, "vision")
    assert found["masking.vision.black.k1"] == pytest.approx(np.mean(chosen.counts == 4))
    assert found["masking.vision.black.k1.digits"] == 1
    assert found["masking.vision.black.shift.k1"] == -1


# --- what is hidden -----------------------------------------------------------------------------


def test_hidden_patches_are_no_keys_in_any_block_of_tower_and_decoder():
    subject = subject_of(random_model(), per_count=2)
    vlm, boards = subject.number, subject.examples.boards[:5]
    places = np.array([[0, 15], [3, 4], [7, 1], [2, 9], [14, 5]])
    batch = Asker(vlm).number("vision", boards)
    found = vlm.run(batch, edits=[mask_of(subject, "vision", boards, places)], logits_at="last")
    seen = torch.ones(5, 16, dtype=torch.bool)
    seen[torch.arange(5)[:, None], torch.from_numpy(places)] = False
    keys = torch.ones(5, batch.tokens.shape[1], dtype=torch.bool)
    keys[:, 2:18] = seen  # behind <bos> and <image_start>
    raw = vlm.raw
    image = raw.projector(raw.vision(**batch.inputs, key_masks=[seen]))
    stream = raw.decode(raw.input_to_embed(batch.tokens, image), batch.positions, key_masks=[keys])
    want = raw.unembed(raw.ln_final(stream))[:, -1]
    torch.testing.assert_close(found.logits[:, 0], want)
    assert not torch.allclose(want, vlm.run(batch, logits_at="last").logits[:, 0], atol=1e-4)


def test_hidden_letters_are_no_keys_in_the_decoder():
    subject = subject_of(random_model(), per_count=2)
    vlm, strings = subject.number, subject.examples.strings[:3]
    places = np.array([[0, 15], [3, 4], [7, 1]])
    batch = Asker(vlm).number("text", strings)
    found = vlm.run(batch, edits=[mask_of(subject, "text", strings, places)], logits_at="last")
    keys = torch.ones(3, batch.tokens.shape[1], dtype=torch.bool)
    keys[torch.arange(3)[:, None], torch.from_numpy(places) + 2] = False
    raw = vlm.raw
    stream = raw.decode(raw.input_to_embed(batch.tokens), batch.positions, key_masks=[keys])
    torch.testing.assert_close(found.logits[:, 0], raw.unembed(raw.ln_final(stream))[:, -1])


def test_what_is_hidden_is_of_its_kind_in_an_order_without_repeats(counting):
    chosen, _ = select(CONFIG, counting, "vision")
    probe = fit_probe(counting, CONFIG)
    called = called_kinds(probe, counting, chosen.items)
    for kind, label in (("black", BLACK), ("white", WHITE), ("empty", EMPTY)):
        order = chosen.orders[kind]
        assert order.shape == (len(chosen.items), 2)
        assert (np.take_along_axis(called, order, 1) == label).all()
        assert (order[:, 0] != order[:, 1]).all()
    strings, _ = select(CONFIG, counting, "text")
    letters = np.take_along_axis(strings.items, strings.orders["c"], 1)
    others = np.take_along_axis(strings.items, strings.orders["other"], 1)
    assert (letters == C).all() and (others != C).all()


def test_cells_hidden_at_random_are_uniform_over_the_board(stubborn):
    subject = subject_of(stubborn.number, per_count=300, counts=(3,))
    chosen, _ = select(replace(CONFIG, boards=300), subject, "vision")
    times = np.bincount(chosen.orders["random"].ravel(), minlength=16)
    expected = times.sum() / 16
    assert ((times - expected) ** 2 / expected).sum() < 37.7  # chi squared, 15 degrees, p = .001


def test_the_seed_chooses_what_is_hidden_and_nothing_else_does(counting):
    few = replace(CONFIG, most=1, boards=6)
    assert masking.run(few, counting) == masking.run(few, counting)
    first, _ = select(CONFIG, counting, "vision")
    other, _ = select(replace(CONFIG, mask_seed=1), counting, "vision")
    assert np.array_equal(first.items, other.items)  # all that there are
    assert not np.array_equal(first.orders["black"], other.orders["black"])


# --- which boards -------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_boards_are_of_id_counts_answered_right_with_enough_of_every_kind(stubborn, modality):
    examples, chosen = stubborn.examples, select(CONFIG, stubborn, modality)[0]
    labels = (BLACK, WHITE, EMPTY) if modality == "vision" else (C,)
    usable = [
        item
        for item, count in zip(stubborn.items(modality), examples.counts, strict=True)
        if count == 3 and all((item == label).sum() >= 2 for label in labels)
    ]
    assert np.array_equal(chosen.items, np.stack(usable))
    assert set(chosen.counts.tolist()) == {3}


def test_boards_that_are_left_out_are_told_with_the_reason(stubborn):
    config = replace(CONFIG, most=2, boards=3)
    metrics = masking.run(config, stubborn).metrics
    boards, counts = stubborn.examples.boards, stubborn.examples.counts
    enough = np.all([(boards == kind).sum((1, 2)) >= 2 for kind in (0, 1, 2)], axis=0)
    seen = counts <= WORLD.vision_max
    assert metrics["masking.vision.boards"] == 3
    assert metrics["masking.vision.few"] == (seen & ~enough).sum()
    assert metrics["masking.vision.wrong"] == (seen & enough & (counts != 3)).sum()
    assert metrics["masking.vision.spare"] == (seen & enough & (counts == 3)).sum() - 3
    assert metrics["masking.text.strings"] == 3
    assert metrics["masking.vision.black.k1.n"] == 3


@pytest.mark.parametrize(("counts", "per_count"), [((6, 7), 3), ((9,), 1), ((0, 1), 2), (None, 4)])
def test_without_a_board_to_hide_on_there_are_no_shares_and_the_figure_says_so(counts, per_count):
    """A model that answers nothing right, regimes that are not ID, or too few stones."""
    subject = subject_of(random_model(), counts=counts, per_count=per_count)
    result = written(masking.run(replace(CONFIG, most=5), subject))
    assert not [key for key in result.metrics if ".k" in key]
    assert result.metrics["masking.vision.boards"] == result.metrics["masking.text.strings"] == 0
    fig = masking.figure(result)
    assert [text.get_text() for text in fig.axes[0].texts] == ["no examples"]
    plt.close(fig)
    assert masking.table(result).rows == []


@pytest.mark.parametrize("name", ["most", "boards"])
def test_nothing_to_hide_and_nowhere_to_hide_it_are_refused(counting, name):
    with pytest.raises(InputError, match=f"{name} is 0.*at least 1"):
        masking.run(replace(CONFIG, **{name: 0}), counting)


# --- the result ---------------------------------------------------------------------------------


def test_keys_are_complete_and_the_data_hold_what_the_metrics_say(result):
    kinds = [f"masking.{modality}.{kind}" for modality in KINDS for kind in KINDS[modality]]
    keys = {
        f"{kind}{key}{end}"
        for kind in kinds
        for k in (1, 2)
        for key in (f".k{k}", f".k{k}.digits", f".shift.k{k}")
        for end in ("", ".low", ".high", ".n")
    }
    counts = {
        f"masking.{modality}.{name}"
        for modality, own in (("vision", "boards"), ("text", "strings"))
        for name in (own, "few", "wrong", "spare")
    }
    assert set(result.metrics) == keys | counts
    for what, infix in (("right", ""), ("shift", ".shift")):
        for modality, curves in result.data[what].items():
            for kind, rows in curves.items():
                for k, row in enumerate(rows, 1):
                    key = f"masking.{modality}.{kind}{infix}.k{k}"
                    assert row["value"] == result.metrics[key]
                    assert row["low"] == result.metrics[f"{key}.low"]


def test_the_figure_draws_every_kind_with_its_interval_from_the_data_alone(result):
    fig = masking.figure(replace(written(result), metrics={}))
    for ax, what in zip(fig.axes, ("right", "shift"), strict=True):
        curves = [rows for kinds in result.data[what].values() for rows in kinds.values()]
        assert len(ax.containers) == len(curves) == 6
        for drawn, rows in zip(ax.containers, curves, strict=True):
            line, _, (bars,) = drawn
            assert line.get_ydata().tolist() == [row["value"] for row in rows]
            ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
            want = [[row["low"], row["high"]] for row in rows]
            np.testing.assert_allclose(np.sort(ends, 1), want, atol=1e-12)
        assert ax.get_xlabel() == "hidden patches or letters k"
    assert "stones" in fig.axes[1].get_ylabel()
    plt.close(fig)


def test_the_table_has_a_row_for_each_kind(result):
    table = masking.table(written(result))
    assert [row[0] for row in table.rows] == [
        *(f"vision: {kind}" for kind in KINDS["vision"]),
        *(f"text: {kind}" for kind in KINDS["text"]),
    ]
    assert table.rows[0][1].startswith("100.0 [")
    assert table.rows[0][-1] == "-2.00 [-2.00, -2.00]"
