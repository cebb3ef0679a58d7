"""Boards, strings and pictures: what is drawn, how it is split, and that it looks as published."""

import json
from base64 import b64decode
from io import BytesIO
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.stats import binomtest, chisquare

from circuits.counting.boards import (
    BLACK,
    EMPTY,
    STONES,
    WHITE,
    C,
    World,
    cell_patches,
    draw_boards,
    draw_strings,
    generator,
    read_board,
    render,
    split_of,
)
from interp.errors import InputError

PUBLISHED = {  # file: size, spread, {picture: pixels a cell}
    "testing_data_formal.jsonl": (19, 30, {"img_c": 14}),
    "testing_data_formal_ood.jsonl": (19, 30, {"img_c": 14}),
    "testing_data_8x8_0_to_49.jsonl": (8, 5, {"img_c": 14}),
    "testing_data_qwen3vl_6x6_0_to_20.jsonl": (6, 5, {"img_c": 16, "img_c_2": 32}),
}
published = pytest.mark.parametrize("name", PUBLISHED)


def records(shared_data, name):
    lines = (shared_data / "counting" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def picture(record, key):
    return np.array(Image.open(BytesIO(b64decode(record[key]["image_b64"]))))


def board_of(record, size):
    cells = [STONES.index(stone) for stone in record["str_c"]]
    return np.array(cells, dtype=np.int8).reshape(size, size)


def black(count, *, examples, size=8, spread=5, seed=0, split="train"):
    counts = np.full(examples, count)
    return draw_boards(counts, size=size, spread=spread, seed=seed, split=split)


def whites(count, *, examples=2200, **how):
    return (black(count, examples=examples, **how) == WHITE).sum(axis=(1, 2))


# The published pictures


@published
def test_every_published_picture_is_rendered_pixel_for_pixel(shared_data, name):
    size, _, pictures = PUBLISHED[name]
    for record, (key, cell) in product(records(shared_data, name), pictures.items()):
        drawn = render(board_of(record, size), cell=cell)
        np.testing.assert_array_equal(drawn, picture(record, key), err_msg=name)


@published
def test_every_published_picture_is_read_as_its_board(shared_data, name):
    size, _, pictures = PUBLISHED[name]
    for record, key in product(records(shared_data, name), pictures):
        board = read_board(picture(record, key), size=size)
        np.testing.assert_array_equal(board, board_of(record, size), err_msg=name)


@published
def test_published_boards_have_numbers_of_white_stones_that_are_drawn_too(shared_data, name):
    size, spread, _ = PUBLISHED[name]
    found = {}
    for record in records(shared_data, name):
        found.setdefault(record["num_black"], []).append(record["str_c"].count("O"))
    for count, numbers in found.items():
        drawn = whites(count, examples=600, size=size, spread=spread)
        assert drawn.min() <= min(numbers) and max(numbers) <= drawn.max()


def test_published_white_stones_pile_up_at_the_cells_that_are_left(shared_data):
    """Drawn first and cut then: 2 in 3 of the boards with 32 or 33, not 1 in 5, are full."""
    found = [
        (record["num_black"], record["str_c"].count("O"))
        for record in records(shared_data, "testing_data_8x8_0_to_49.jsonl")
    ]
    full = [white == 64 - count for count, white in found if count in (32, 33)]
    assert sum(full) == 6 and len(full) == 8
    drawn = np.concatenate([whites(32) == 32, whites(33) == 31]).mean()
    assert drawn == pytest.approx((6 / 11 + 8 / 11) / 2, abs=0.03)


# Pictures of any size


@given(arrays(np.int8, (3, 4), elements=st.integers(0, 2)), st.integers(5, 40))
def test_a_picture_is_its_cells_patches_side_by_side(board, cell):
    tiled = np.block([[[cell_patches(cell)[kind]] for kind in row] for row in board.tolist()])
    np.testing.assert_array_equal(render(board, cell=cell), tiled)


@given(st.data(), st.integers(1, 7), st.integers(5, 20))
def test_reading_inverts_rendering(data, size, cell):
    board = data.draw(arrays(np.int8, (size, size), elements=st.integers(0, 2)))
    np.testing.assert_array_equal(read_board(render(board, cell=cell), size=size), board)


@pytest.mark.parametrize("cell", [5, 6, 14, 15, 128])
def test_the_three_kinds_of_cell_look_different(cell):
    assert len({patch.tobytes() for patch in cell_patches(cell)}) == 3


def test_the_cell_patches_cannot_be_changed_for_others():
    with pytest.raises(ValueError, match="read-only"):
        cell_patches()[0] = 0


@pytest.mark.parametrize("shape", [(112, 98, 3), (98, 112, 3), (113, 113, 3), (32, 32, 3)])
def test_a_picture_of_another_size_is_refused_with_both_sizes(shape):
    with pytest.raises(InputError, match=f"{shape[1]}x{shape[0]} pixels.* 8x8 .*112x112"):
        read_board(np.zeros(shape, dtype=np.uint8), size=8)


def test_a_picture_with_one_wrong_pixel_is_refused_at_its_cell():
    pixels = render(black(10, examples=1)[0])
    pixels[2 * 14 + 3, 5 * 14 + 1] += 1
    with pytest.raises(InputError, match="row 3, column 6"):
        read_board(pixels, size=8)


@pytest.mark.parametrize(
    ("shape", "kind", "cell", "message"),
    [
        ((8, 8), 0, 4, "4 pixels a cell"),
        ((8, 8), 0, 129, "129 pixels a cell"),
        ((8, 8), 3, 14, "from 3 to 3"),
        ((8, 8), -1, 14, "from -1 to -1"),
        ((0, 8), 0, 14, "0x8 cells"),
        ((1000, 1000), 0, 14, "196,000,000 pixels"),
    ],
)
def test_boards_that_cannot_be_drawn_are_refused(shape, kind, cell, message):
    with pytest.raises(InputError, match=message):
        render(np.full(shape, kind, dtype=np.int8), cell=cell)


# What is drawn


@settings(max_examples=30)
@given(st.integers(4, 9), st.integers(0, 20), st.sampled_from(["train", "test"]), st.data())
def test_boards_and_strings_have_the_counts_asked_for(size, seed, split, data):
    counts = np.array(data.draw(st.lists(st.integers(1, size**2 - 3), max_size=20)), dtype=int)
    boards = draw_boards(counts, size=size, spread=4, seed=seed, split=split)
    strings = draw_strings(counts, length=size**2, seed=seed, split=split)
    np.testing.assert_array_equal((boards == BLACK).sum(axis=(1, 2)), counts)
    np.testing.assert_array_equal((strings == C).sum(axis=1), counts)
    assert set(np.unique(boards)) <= {EMPTY, BLACK, WHITE} and set(np.unique(strings)) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("count", "expected"),
    [(10, range(5, 16)), (5, range(0, 11)), (2, range(0, 8)), (29, range(24, 35))],
)
def test_white_stones_are_uniform_within_the_spread(count, expected):
    numbers, times = np.unique(whites(count), return_counts=True)
    assert numbers.tolist() == list(expected)
    assert chisquare(times).pvalue > 0.01


@pytest.mark.parametrize(("count", "left"), [(40, 24), (49, 15), (35, 29), (60, 4)])
def test_white_stones_fill_a_board_that_has_no_room_for_the_spread(count, left):
    assert set(whites(count)) == {left}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_cell_is_as_likely_as_any_other(split):
    boards = black(16, examples=4000, split=split)
    strings = draw_strings(np.full(4000, 16), length=64, seed=0, split=split).reshape(-1, 8, 8)
    for chosen in (boards == BLACK, strings == C):
        # 64 cells, standard error .0068 each
        np.testing.assert_allclose(chosen.mean(axis=0), 16 / 64, atol=4.5 * 0.0068)


def test_the_other_letters_are_fair_coin_flips():
    strings = draw_strings(np.full(500, 14), length=64, seed=0, split="train")
    heads = int((strings == 0).sum())
    assert binomtest(heads, 500 * 50).pvalue > 0.01


def test_a_board_and_a_string_of_one_seed_share_no_more_places_than_chance():
    stones = black(32, examples=2000) == BLACK
    letters = draw_strings(np.full(2000, 32), length=64, seed=0, split="train") == C
    assert (stones.reshape(2000, 64) == letters).mean() == pytest.approx(0.5, abs=0.005)


# Seeds


@pytest.mark.parametrize("seed", [0, 7, (3, 0, 5)])
def test_a_seed_repeats_its_boards_and_strings(seed):
    counts = np.arange(20)
    np.testing.assert_array_equal(
        *(draw_boards(counts, size=8, spread=5, seed=seed, split="test") for _ in range(2))
    )
    np.testing.assert_array_equal(
        *(draw_strings(counts, length=64, seed=seed, split="test") for _ in range(2))
    )


def test_streams_of_a_seed_differ():
    assert generator(0, stream=1).random() != generator(0, stream=2).random()


def test_seeds_differ_also_in_zeros_at_their_end():
    boards = [black(20, examples=1, seed=seed).tobytes() for seed in (1, 2, (1, 0), (1, 0, 0))]
    assert len(set(boards)) == 4


@pytest.mark.parametrize("seed", [-1, (1, -2)])
def test_a_negative_seed_is_refused(seed):
    with pytest.raises(InputError, match="at least 0"):
        black(3, examples=1, seed=seed)


# Splits


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_train_and_test_are_disjoint_whatever_the_seeds(train_seed, test_seed):
    """Of 4200 boards and 5376 strings: without splits some 20 of 300 would be in both."""
    counts = np.full(300, 3)
    boards, strings = (
        [
            {cells.tobytes() for cells in draw(seed, split)}
            for seed, split in ((train_seed, "train"), (test_seed, "test"))
        ]
        for draw in (
            lambda seed, split: draw_boards(counts, size=3, spread=1, seed=seed, split=split),
            lambda seed, split: draw_strings(counts, length=9, seed=seed, split=split),
        )
    )
    assert not boards[0] & boards[1] and not strings[0] & strings[1]


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_is_drawn_for_a_split_belongs_to_it(split):
    counts = np.arange(60)
    boards = draw_boards(counts, size=8, spread=5, seed=4, split=split)
    strings = draw_strings(counts, length=64, seed=4, split=split)
    assert {split_of(cells) for cells in [*boards, *strings]} == {split}


def test_one_board_in_eight_is_a_test_board_and_always_the_same():
    boards = [np.array(cells).reshape(2, 2) for cells in product(range(3), repeat=4)]
    tests = [board.ravel().tolist() for board in boards if split_of(board) == "test"]
    assert tests == TEST_BOARDS_2X2
    rng = np.random.default_rng(0)
    share = np.mean([split_of(rng.integers(0, 3, (6, 6))) == "test" for _ in range(4000)])
    assert share == pytest.approx(1 / 8, abs=0.02)


# Results with shipped weights hold only as long as these stay test boards.
TEST_BOARDS_2X2 = [
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 1, 1, 0],
    [0, 1, 2, 0],
    [0, 2, 0, 0],
    [1, 0, 2, 0],
    [1, 2, 0, 2],
]


@pytest.mark.parametrize("place", [0, 30, 63])
def test_every_cell_has_a_say_in_the_split(place):
    boards = black(20, examples=400).reshape(400, 64)
    boards[:, place] = (boards[:, place] + 1) % 3  # they were all in train
    share = np.mean([split_of(board.reshape(8, 8)) == "test" for board in boards])
    assert share == pytest.approx(1 / 8, abs=0.05)


def test_a_full_board_is_in_one_split_and_the_error_names_it():
    full = np.full((8, 8), BLACK, dtype=np.int8)
    has, lacks = ("test", "train") if split_of(full) == "test" else ("train", "test")
    np.testing.assert_array_equal(black(64, examples=1, split=has)[0], full)
    with pytest.raises(
        InputError, match=f"board of 8x8 with count 64 .*'{lacks}'.* use split '{has}'"
    ):
        black(64, examples=1, split=lacks)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.array([3, -1])}, "count -1 for a board of 8x8: must be between 0 and 64"),
        ({"counts": np.array([65])}, "count 65 for a board of 8x8: must be between 0 and 64"),
        ({"counts": np.array([1.0])}, "whole numbers"),
        ({"counts": np.array([True])}, "whole numbers"),
        ({"size": 0}, "size must be at least 1"),
        ({"size": -3}, "size must be at least 1"),
        ({"size": 10**6}, "1,000,000,000,000 cells: at most 10,000,000"),
        ({"spread": -1}, "spread -1"),
        ({"spread": 65}, "spread 65"),
        ({"split": "validation"}, "unknown split 'validation'"),
    ],
)
def test_impossible_boards_are_refused(change, message):
    asked = {"counts": np.array([3]), "size": 8, "spread": 5, "seed": 0, "split": "train"}
    asked |= change
    with pytest.raises(InputError, match=message):
        draw_boards(asked.pop("counts"), **asked)


@pytest.mark.parametrize(
    ("counts", "length", "message"),
    [
        ([3, -1], 64, "count -1 for a string of 64 letters"),
        ([65], 64, "count 65 for a string of 64 letters"),
        ([0.5], 64, "whole numbers"),
        ([0], 0, "at least 1"),
        ([0], 10**8, "100,000,000 cells"),
        ([5] * 200_000, 64, "12,800,000 cells"),
    ],
)
def test_impossible_strings_are_refused(counts, length, message):
    with pytest.raises(InputError, match=message):
        draw_strings(np.array(counts), length=length, seed=0, split="train")


def test_no_counts_give_no_boards():
    assert draw_boards(np.array([], dtype=int), size=8, spread=5, seed=0, split="test").shape == (
        0,
        8,
        8,
    )


# Worlds


def test_the_regimes_of_the_default_world():
    world = World()
    assert world.regimes == {"id": range(20), "ve": range(20, 40), "fe": range(40, 50)}
    assert world.counts == tuple(range(50))


def test_counts_between_and_beyond_the_regimes_belong_to_none():
    world = World(size=6, vision_max=5, text_max=12, further=(15, 20))
    found = [world.regime_of(count) for count in (-1, 0, 5, 6, 12, 13, 14, 15, 20, 21)]
    assert found == [None, "id", "id", "ve", "ve", None, None, "fe", "fe", None]
    assert world.counts == (*range(13), *range(15, 21))


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": 7, "further": (40, 50)},
        {"vision_max": -1},
        {"vision_max": 39},
        {"text_max": 40},
        {"further": (49, 40)},
        {"spread": -1},
        {"size": 10**5},
    ],
)
def test_worlds_that_contradict_themselves_are_refused(change):
    with pytest.raises(InputError):
        World(**change)
