"""Sets of examples: what is made, what is read, and that no broken record is read silently."""

import json
from base64 import b64decode, b64encode
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from scipy.stats import chisquare

from circuits.counting.boards import BLACK, WHITE, C, World, render, split_of
from circuits.counting.examples import Examples, load_examples, make_examples, save_examples
from interp.errors import InputError

WORLDS = {
    "testing_data_8x8_0_to_49.jsonl": World(),
    "testing_data_formal.jsonl": World(
        size=19, spread=30, vision_max=49, text_max=99, further=(100, 120)
    ),
    "testing_data_formal_ood.jsonl": World(
        size=19, spread=30, vision_max=49, text_max=99, further=(100, 120)
    ),
    "testing_data_qwen3vl_6x6_0_to_20.jsonl": World(
        size=6, vision_max=9, text_max=19, further=(20, 20)
    ),
}
published = pytest.mark.parametrize("name", WORLDS)
SMALL = World(size=4, spread=3, vision_max=2, text_max=5, further=(6, 7))


@pytest.fixture(scope="module")
def examples():
    return make_examples(World(), per_count=4, seed=1)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The 24 records of a small file, three of each count from 0 to 7."""
    path = tmp_path_factory.mktemp("small") / "small.jsonl"
    save_examples(make_examples(SMALL, per_count=3, seed=0), path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def number_of_c(strings):
    return np.array([list(string).count(C) for string in strings])


def load_lines(tmp_path, records, *, world=SMALL):
    """Load a file of records; one that is a string or bytes is written as it is."""
    content = [json.dumps(record) if isinstance(record, dict) else record for record in records]
    encoded = [line.encode() if isinstance(line, str) else line for line in content]
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return load_examples(path, world)


def encode(image, kind="PNG"):
    buffer = BytesIO()
    image.save(buffer, kind)
    return b64encode(buffer.getvalue()).decode()


def with_picture(record, encoded):
    return record | {"img_c": {"format": "PNG", "image_b64": encoded}}


def board_of(record):
    cells = np.array([".XO".index(stone) for stone in record["str_c"]], dtype=np.int8)
    return cells.reshape(4, 4)


# Made examples


def test_made_examples_hold_what_they_promise(examples):
    np.testing.assert_array_equal(examples.counts, np.repeat(np.arange(50), 4))
    np.testing.assert_array_equal((examples.boards == BLACK).sum(axis=(1, 2)), examples.counts)
    np.testing.assert_array_equal(number_of_c(examples.strings), examples.counts)
    np.testing.assert_array_equal(number_of_c(examples.equal), examples.counts)
    assert (number_of_c(examples.unequal) != examples.counts).all()


def test_distances_are_the_differences_of_the_unequal_strings(examples):
    np.testing.assert_array_equal(
        examples.distances,
        abs(number_of_c(examples.unequal) - np.repeat(np.arange(50), 4)),
    )


def test_unequal_numbers_are_uniform_over_all_others():
    made = make_examples(World(), per_count=4000, seed=0, counts=[10], split="train")
    numbers, times = np.unique(number_of_c(made.unequal), return_counts=True)
    assert numbers.tolist() == [n for n in range(64) if n != 10]
    assert chisquare(times).pvalue > 0.01


def test_an_equal_string_is_never_the_same_string(examples):
    assert not (examples.equal == examples.strings).all(axis=1).any()


def test_an_equal_string_is_another_one_even_where_few_exist():
    """A string of four letters with three c is one of eight."""
    world = World(size=2, spread=1, vision_max=1, text_max=2, further=(3, 3))
    made = make_examples(world, per_count=50, seed=0, split="train", counts=[3])
    assert not (made.equal == made.strings).all(axis=1).any()


def test_a_full_string_has_no_equal_partner():
    world = World(size=3, spread=1, vision_max=1, text_max=2, further=(3, 9))
    with pytest.raises(InputError, match="no second string with 9 letters c of 9"):
        make_examples(world, per_count=1, seed=0, split="train", counts=[9])


@pytest.mark.parametrize("split", ["train", "test"])
def test_all_parts_of_an_example_belong_to_its_split(split):
    made = make_examples(World(), per_count=1, seed=2, split=split)
    parts = [*made.boards, *made.strings, *made.equal, *made.unequal]
    assert {split_of(cells) for cells in parts} == {split}


def test_made_examples_repeat_with_their_seed_and_change_with_it(examples):
    assert examples == make_examples(World(), per_count=4, seed=1)
    assert examples != make_examples(World(), per_count=4, seed=2)
    assert examples != make_examples(World(), per_count=4, seed=(1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [3, 50]}, r"\[50\] are outside .* id 0..19, ve 20..39, fe 40..49"),
        ({"counts": [-1]}, r"\[-1\] are outside"),
        ({"counts": []}, "each of 0 counts"),
        ({"per_count": 0}, "0 examples"),
        ({"per_count": 10**6}, "cells: at most"),
        ({"split": "dev"}, "unknown split 'dev'"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_examples_that_cannot_be_made_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        make_examples(World(), **({"per_count": 1, "seed": 0} | change))


# The value


def test_selecting_keeps_each_example_together(examples):
    chosen = examples.select(np.array([199, 0, 9]))
    assert len(chosen) == 3 and chosen.counts.tolist() == [49, 0, 2]
    for name in ("boards", "strings", "equal", "unequal"):
        np.testing.assert_array_equal(getattr(chosen, name), getattr(examples, name)[[199, 0, 9]])
    assert examples.select(examples.counts == 7) == examples.select(slice(28, 32))


def test_regimes_are_masks_and_those_without_examples_are_absent(examples):
    masks = examples.regimes(World())
    assert {name: mask.sum() for name, mask in masks.items()} == {"id": 80, "ve": 80, "fe": 40}
    assert list(examples.select(masks["ve"]).regimes(World())) == ["ve"]


@pytest.mark.parametrize("name", ["counts", "boards", "strings", "equal", "unequal"])
def test_parts_that_contradict_each_other_are_refused(examples, name):
    parts = {key: getattr(examples, key) for key in Examples.__annotations__}
    parts[name] = {
        "counts": examples.counts + 1,
        "unequal": examples.strings,
    }.get(name, getattr(examples, name)[::-1])
    with pytest.raises(InputError, match="200 counts") as raised:
        Examples(**parts)
    assert "\n" not in str(raised.value)


# Published records


@published
def test_published_records_load(shared_data, name):
    path = shared_data / "counting" / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = load_examples(path, WORLDS[name])
    assert len(loaded) == len(records)
    for record, count, board in zip(records, loaded.counts, loaded.boards, strict=True):
        assert record["num_black"] == count
        assert "".join(".XO"[cell] for cell in board.ravel()) == record["str_c"]
    for key, strings in (
        ("text_c", loaded.strings),
        ("text_eq", loaded.equal),
        ("text_ie", loaded.unequal),
    ):
        written = ["".join("abc"[letter] for letter in string) for string in strings]
        assert written == [record[key] for record in records]


def test_the_published_files_hold_the_regimes_of_their_world(shared_data):
    def regimes(name):
        loaded = load_examples(shared_data / "counting" / name, WORLDS[name])
        return {key: int(mask.sum()) for key, mask in loaded.regimes(WORLDS[name]).items()}

    assert regimes("testing_data_8x8_0_to_49.jsonl") == {"id": 80, "ve": 80, "fe": 40}
    assert regimes("testing_data_formal.jsonl") == {"id": 100, "ve": 100}
    assert regimes("testing_data_formal_ood.jsonl") == {"fe": 42}


@published
def test_saved_records_are_the_published_ones(shared_data, tmp_path, name):
    """All but what is not read: the index, PNG compression, and the wording on 6x6 boards."""
    path = shared_data / "counting" / name
    save_examples(load_examples(path, WORLDS[name]), tmp_path / name)
    ours, theirs = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (tmp_path / name, path)
    )
    keys = ["num_black", "str_c", "text_c", "text_eq", "text_ie"]
    if WORLDS[name].size != 6:
        keys.append("question")
        assert ours[0].keys() == theirs[0].keys()
        assert ours[0]["img_c"].keys() == theirs[0]["img_c"].keys()
    for our, their in zip(ours, theirs, strict=True):
        assert [our[key] for key in keys] == [their[key] for key in keys]


def test_records_of_another_world_are_refused_with_both_sizes(shared_data):
    path = shared_data / "counting" / "testing_data_formal.jsonl"
    with pytest.raises(
        InputError, match="^testing_data_formal.jsonl line 1: a board of 19x19.* 8x8"
    ):
        load_examples(path, World())


# Saving and loading


def test_what_is_saved_loads_as_it_was(examples, tmp_path):
    save_examples(examples, tmp_path / "examples.jsonl")
    assert load_examples(tmp_path / "examples.jsonl", World()) == examples
    assert [path.name for path in tmp_path.iterdir()] == ["examples.jsonl"]


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(examples, tmp_path):
    path = tmp_path / "examples.jsonl"
    save_examples(examples, path)
    before = path.read_bytes()
    boards = examples.boards.copy()
    boards[-1][boards[-1] == WHITE] = 7  # no cell: its picture cannot be drawn
    bad = Examples(examples.counts, boards, examples.strings, examples.equal, examples.unequal)
    with pytest.raises(InputError, match="goes from 0 to 7|goes from 1 to 7"):
        save_examples(bad, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_blank_lines_are_allowed_at_the_end_only(lines, tmp_path):
    assert len(load_lines(tmp_path, [*lines, "", "  ", ""])) == 24
    with pytest.raises(InputError, match="line 2: not JSON"):
        load_lines(tmp_path, [lines[0], "", lines[1]])


def test_lines_may_end_as_on_windows(lines, tmp_path):
    assert len(load_lines(tmp_path, [json.dumps(line) + "\r" for line in lines])) == 24


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"^empty.jsonl is empty"):
        load_examples(tmp_path / "empty.jsonl", SMALL)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "picture.jsonl"
    Image.new("RGB", (9, 9), "white").save(path, "PNG")
    with pytest.raises(InputError, match=r"^picture.jsonl line 1: this is not UTF-8 text"):
        load_examples(path, SMALL)


def test_a_file_that_is_missing_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_examples(tmp_path / "none.jsonl", SMALL)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA"])
def test_a_picture_of_another_mode_with_the_same_look_is_read(lines, tmp_path, mode):
    picture = Image.fromarray(render(board_of(lines[20])))
    other = picture.quantize() if mode == "P" else picture.convert(mode)
    assert other.mode == mode
    assert load_lines(tmp_path, [with_picture(lines[20], encode(other))])


@pytest.mark.parametrize("cell", [5, 14, 16, 33])
def test_a_picture_may_have_any_cell_size(lines, tmp_path, cell):
    picture = Image.fromarray(render(board_of(lines[20]), cell=cell))
    assert load_lines(tmp_path, [with_picture(lines[20], encode(picture))])


# Broken records. Line 17 has count 5.


def changed(key, value):
    return lambda record: record | {key: value}


def without(key):
    return lambda record: {name: value for name, value in record.items() if name != key}


def drawn(change):
    """The record with a picture that is changed as an array."""

    def apply(record):
        pixels = render(board_of(record))
        return with_picture(record, encode(Image.fromarray(change(pixels))))

    return apply


def bytes_of_picture(change):
    def apply(record):
        content = b64decode(record["img_c"]["image_b64"])
        return with_picture(record, b64encode(change(content)).decode())

    return apply


def one_stone_more(record):
    place = record["str_c"].index(".")
    return record | {"str_c": record["str_c"][:place] + "X" + record["str_c"][place + 1 :]}


def moved_stone(record):
    stones = list(record["str_c"])
    stone, gap = stones.index("X"), stones.index(".")
    stones[stone], stones[gap] = ".", "X"
    return record | {"str_c": "".join(stones)}


def one_pixel_off(pixels):
    pixels = pixels.copy()
    pixels[3 * 14 + 1, 2 * 14 + 1] = (222, 184, 134)
    return pixels


BROKEN = {
    "cut short": (lambda record: json.dumps(record)[:-40], "not JSON, or a line cut short"),
    "no JSON": (lambda record: "num_black,img_c", "not JSON"),
    "number too long": (
        lambda record: '{"num_black": ' + "1" * 5000 + "}",
        "not JSON that can be read",
    ),
    "nested too deep": (lambda record: "[" * 100_000, "not JSON"),
    "a list": (lambda record: "[1, 2]", "a record is a JSON object, this is a list"),
    "other encoding": (lambda record: '{"ü": 1}'.encode("latin-1"), "not UTF-8 text"),
    "nothing in it": (lambda record: "{}", "no key 'num_black'; there are none"),
    **{
        f"no {key}": (without(key), f"no key '{key}'; there are global_idx")
        for key in ("num_black", "img_c", "str_c", "text_c", "text_eq", "text_ie")
    },
    "no picture": (changed("img_c", {"format": "PNG"}), "no key 'image_b64'; there are format"),
    "num_black text": (changed("num_black", "5"), "'num_black' must be int, it is str"),
    "num_black fraction": (changed("num_black", 5.0), "'num_black' must be int, it is float"),
    "num_black true": (changed("num_black", True), "'num_black' must be int, it is bool"),
    "num_black huge": (changed("num_black", 10**30), "num_black is 1000.*str_c has 5 black"),
    "num_black negative": (changed("num_black", -5), "num_black is -5, str_c has 5"),
    "img_c text": (changed("img_c", "iVBO"), "'img_c' must be dict, it is str"),
    "image null": (lambda record: with_picture(record, None), "'image_b64' must be str"),
    "str_c list": (changed("str_c", ["."] * 16), "'str_c' must be str, it is list"),
    "text_c number": (changed("text_c", 5), "'text_c' must be str, it is int"),
    "no base64": (
        lambda record: with_picture(record, record["img_c"]["image_b64"].replace("A", "!A", 1)),
        "no PNG that can be decoded",
    ),
    "base64 of no picture": (
        lambda record: with_picture(record, b64encode(b"hello").decode()),
        "no PNG that can be decoded",
    ),
    "empty picture": (lambda record: with_picture(record, ""), "no PNG that can be decoded"),
    "picture cut": (bytes_of_picture(lambda content: content[:-60]), "no PNG that can be decoded"),
    "header only": (bytes_of_picture(lambda content: content[:30]), "no PNG that can be decoded"),
    "JPEG": (
        lambda record: with_picture(
            record, encode(Image.fromarray(render(board_of(record))), "JPEG")
        ),
        "no PNG that can be decoded",
    ),
    "picture of a smaller board": (
        drawn(lambda pixels: pixels[:42, :42]),
        "42x42 pixels.*4x4 board has 56x56",
    ),
    "picture not square": (drawn(lambda pixels: pixels[:42]), "56x42 pixels.* 56x56"),
    "giant picture, refused by its header": (
        lambda record: with_picture(record, encode(Image.new("1", (8000, 8000)))[:80]),
        "8000x8000 pixels",
    ),
    "no cell": (drawn(one_pixel_off), "row 4, column 3 of the picture"),
    "turned picture": (
        drawn(lambda pixels: 255 - pixels),
        "row 1, column 1 of the picture .* shows neither",
    ),
    "other board": (moved_stone, r"at row \d, column \d .* the picture shows .* str_c has"),
    "one stone more": (one_stone_more, "num_black is 5, str_c has 6 black stones"),
    "other count": (changed("num_black", 4), "num_black is 4, str_c has 5 black stones"),
    "smaller board": (changed("str_c", "X........"), "a board of 3x3, the world's are 4x4"),
    "no square board": (changed("str_c", "." * 15), "str_c has 15 characters, must have 16"),
    "no board": (changed("str_c", ""), "a board of 0x0, the world's are 4x4"),
    "no stone": (changed("str_c", "x" * 16), "str_c has 'x' as character 1"),
    "outside": (changed("str_c", "X" * 8 + "." * 8), "num_black is 5, str_c has 8"),
    "text_c short": (changed("text_c", "abc"), "text_c has 3 characters, must have 16"),
    "text_ie long": (changed("text_ie", "a" * 17), "text_ie has 17 characters, must have 16"),
    "other letter": (changed("text_c", "ccccc" + "d" + "a" * 10), "'d' as character 6"),
    "letters above": (changed("text_eq", "C" * 16), "text_eq has 'C' as character 1"),
    "text_c": (changed("text_c", "c" * 6 + "a" * 10), "text_c has 6 letters c, num_black is 5"),
    "text_eq": (changed("text_eq", "c" * 4 + "a" * 12), "text_eq has 4 letters c, num_black is 5"),
    "text_ie": (changed("text_ie", "c" * 5 + "a" * 11), "text_ie has 5 letters c, it must not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_refused_with_its_line(lines, tmp_path, name):
    change, message = BROKEN[name]
    records = [*lines[:16], change(lines[16]), *lines[17:]]
    with pytest.raises(InputError, match=f"^changed.jsonl line 17: .*{message}") as raised:
        load_lines(tmp_path, records)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


def test_the_first_cell_that_differs_is_named(lines, tmp_path):
    board = np.zeros((4, 4), dtype=np.int8)
    board[1, 2], board[3, 0] = BLACK, WHITE
    record = lines[3] | {"str_c": "......X........."}
    with pytest.raises(
        InputError,
        match=r"at row 4, column 1 \(counted from 1\) the picture shows a white stone, "
        "str_c has an empty cell",
    ):
        load_lines(tmp_path, [with_picture(record, encode(Image.fromarray(render(board))))])


def test_a_count_outside_the_regimes_is_refused_and_not_left_out(lines, tmp_path):
    world = World(size=4, spread=3, vision_max=2, text_max=5, further=(7, 7))
    with pytest.raises(InputError, match=r"line 19: count 6 is outside .* ve 3..5, fe 7..7"):
        load_lines(tmp_path, lines, world=world)
