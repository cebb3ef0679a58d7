"""Sets of counting examples: made from a seed, or read from records that others made.

One example is a board and three strings: one with as many `c` as the board has black stones,
another with the same number, and one with another number. The record format is that of the
published data of "Unveiling the Visual Counting Bottleneck in Vision-Language Models"
(arXiv:2605.30170).
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int8, UInt8
from PIL import Image

from circuits.counting.boards import (
    BLACK,
    LETTERS,
    STONES,
    WOOD,
    C,
    World,
    cell_size,
    check_total,
    draw_boards,
    draw_strings,
    generator,
    read_board,
    render,
)
from interp.errors import InputError

KINDS = ("an empty cell", "a black stone", "a white stone")
WOOD_GREY = 190  # the board's colour in a grey picture, ITU-R 601 luma
QUESTION = {  # as the published records of 8x8 and 19x19 boards have it
    "text_only_tf": "Are the number of c letters in both input strings the same ?",
    "text_only_num": "How many c letters are there in the given string ?",
    "multimodal_tf": "Is the number of c letters in the given string the same as the number of "
    "black stones on the chessboard ?",
    "multimodal_num": "How many black stones are there on the chessboard ?",
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Boards with `counts` black stones, strings of as many `c`, and two more for comparison.

    `equal`: other strings with the same number of `c`; `unequal`: strings with another number.

    Raises:
        InputError: a board or a string that does not have the number that its name promises.
    """

    counts: Int[np.ndarray, "example"]
    boards: Int8[np.ndarray, "example row column"]
    strings: Int8[np.ndarray, "example pos"]
    equal: Int8[np.ndarray, "example pos"]
    unequal: Int8[np.ndarray, "example pos"]

    def __post_init__(self):
        found = {
            "boards": (self.boards == BLACK).sum(axis=(1, 2)),
            "strings": _number_of_c(self.strings),
            "equal": _number_of_c(self.equal),
        }
        wrong = [name for name, them in found.items() if not np.array_equal(them, self.counts)]
        if len(self.unequal) != len(self.counts) or not self.distances.all():
            wrong.append("unequal")
        if wrong:
            raise InputError(
                f"{', '.join(wrong)}: must hold one item for each of the {len(self.counts)} "
                f"counts, with that number of black stones or c (unequal: with another)"
            )

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Examples):
            return NotImplemented
        return all(map(np.array_equal, _arrays(self), _arrays(other)))

    @property
    def distances(self) -> Int[np.ndarray, "example"]:
        """How far the number of `c` in `unequal` is from the count."""
        return np.abs(_number_of_c(self.unequal) - self.counts)

    def select(
        self, which: Bool[np.ndarray, "example"] | Int[np.ndarray, "selected"] | slice
    ) -> "Examples":
        """The examples of a mask, or at given indices in their order."""
        return Examples(*(array[which] for array in _arrays(self)))

    def regimes(self, world: World) -> dict[str, Bool[np.ndarray, "example"]]:
        """Which examples belong to each regime; regimes without examples are left out."""
        masks = {name: np.isin(self.counts, counts) for name, counts in world.regimes.items()}
        return {name: mask for name, mask in masks.items() if mask.any()}


def make_examples(
    world: World,
    *,
    per_count: int,
    seed: int | Sequence[int],
    split: str = "test",
    counts: Sequence[int] | None = None,
) -> Examples:
    """`per_count` examples of every count of the world (or of `counts`), in order.

    The number of `c` in an unequal string is uniform over all other numbers but the full string:
    there is only one of those, and the published records have none.

    Raises:
        InputError: counts outside the world's regimes, `per_count` under 1, or what `draw_boards`
            and `draw_strings` refuse.
    """
    counts = world.counts if counts is None else counts
    outside = [count for count in counts if world.regime_of(count) is None]
    if outside:
        raise InputError(f"counts {outside[:9]} are outside the world's regimes: {_known(world)}")
    if per_count < 1 or not len(counts):
        raise InputError(
            f"{per_count} examples for each of {len(counts)} counts: ask for at least 1 of 1"
        )
    check_total(per_count * len(counts), world.size**2, f"board of {world.size}x{world.size}")
    entropy = (seed,) if isinstance(seed, int) else tuple(seed)
    cells, numbers = world.size**2, np.repeat(np.array(counts, dtype=np.int64), per_count)
    boards = draw_boards(numbers, size=world.size, spread=world.spread, seed=entropy, split=split)
    strings = draw_strings(numbers, length=cells, seed=entropy, split=split)
    others = generator(entropy, stream=3).integers(0, np.where(numbers < cells, cells - 1, cells))
    others += others >= numbers  # uniform over 0 .. cells - 1 without the count
    unequal = draw_strings(others, length=cells, seed=(*entropy, 0), split=split)
    equal = _other_strings(strings, numbers, entropy=entropy, split=split)
    return Examples(numbers, boards, strings, equal, unequal)


def load_examples(path: Path, world: World) -> Examples:
    """The examples of a file of published records, one JSON object a line.

    Of each record `num_black`, `img_c.image_b64`, `str_c`, `text_c`, `text_eq` and `text_ie` are
    read. The picture, a PNG of any cell size and mode (grey as ITU-R 601), must show `str_c`; only
    the cells are used from then on. Blank lines at the end are allowed.

    Raises:
        InputError: the file is empty, or a record is broken, contradicts itself or does not belong
            to `world`; names the file and the line.
        OSError: the file cannot be read.
    """
    path = Path(path)
    lines = path.read_bytes().rstrip().split(b"\n")
    if lines == [b""]:
        raise InputError(f"{path.name} is empty: one record a line is needed")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, world))
        except InputError as error:
            raise InputError(f"{path.name} line {number}: {error}") from error
    counts, *cells = zip(*records, strict=True)
    return Examples(np.array(counts, dtype=np.int64), *map(np.stack, cells))


def save_examples(examples: Examples, path: Path) -> None:
    """Write the records that `load_examples` reads, the file whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    rows = map(_Record._make, zip(*_arrays(examples), strict=True))
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_line(index, row) for index, row in enumerate(rows))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class _Record(NamedTuple):
    black: int | np.integer
    board: Int8[np.ndarray, "row column"]
    string: Int8[np.ndarray, "pos"]
    equal: Int8[np.ndarray, "pos"]
    unequal: Int8[np.ndarray, "pos"]


def _record(line: bytes, world: World) -> _Record:
    """One checked record.

    Raises:
        InputError: what is wrong with it, without the place in the file.
    """
    record = _parsed(line)
    count = _field(record, "num_black", int)
    board = _board(_field(record, "str_c", str), count, world)
    encoded = _field(_field(record, "img_c", dict), "image_b64", str)
    _check_shows(read_board(_pixels(encoded, size=world.size), size=world.size), board)
    string, equal, unequal = (
        _ids(_field(record, key, str), LETTERS, key, length=board.size)
        for key in ("text_c", "text_eq", "text_ie")
    )
    for key, letters in (("text_c", string), ("text_eq", equal)):
        if (found := np.count_nonzero(letters == C)) != count:
            raise InputError(f"{key} has {found} letters c, num_black is {count}")
    if np.count_nonzero(unequal == C) == count:
        raise InputError(f"text_ie has {count} letters c, it must not have num_black ({count})")
    return _Record(count, board, string, equal, unequal)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError("this is not UTF-8 text; records are JSON, one a line") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.colno}"
        raise InputError(f"not JSON, or a line cut short: {what}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 10^5 brackets
        raise InputError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"a record is a JSON object, this is a {type(record).__name__}")
    return record


def _field(record: dict[str, Any], key: str, kind: type) -> Any:
    if key not in record:
        raise InputError(f"no key {key!r}; there are {', '.join(list(record)[:12]) or 'none'}")
    value = record[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{key!r} must be {kind.__name__}, it is {type(value).__name__}")
    return value


def _board(written: str, count: int, world: World) -> Int8[np.ndarray, "row column"]:
    side = isqrt(len(written))
    if side != world.size and side**2 == len(written):
        raise InputError(
            f"a board of {side}x{side}, the world's are {world.size}x{world.size}: "
            f"choose the world of these records"
        )
    board = _ids(written, STONES, "str_c", length=world.size**2)
    if (found := np.count_nonzero(board == BLACK)) != count:
        raise InputError(f"num_black is {count}, str_c has {found} black stones (X)")
    if world.regime_of(count) is None:
        raise InputError(f"count {count} is outside the world's regimes: {_known(world)}")
    return board.reshape(world.size, world.size)


def _ids(written: str, alphabet: str, key: str, *, length: int) -> Int8[np.ndarray, "pos"]:
    if len(written) != length:
        raise InputError(f"{key} has {len(written)} characters, must have {length}")
    ids = [alphabet.find(character) for character in written]
    if -1 in ids:
        place = ids.index(-1)
        raise InputError(
            f"{key} has {written[place]!r} as character {place + 1}; allowed are {alphabet!r}"
        )
    return np.array(ids, dtype=np.int8)


def _pixels(encoded: str, *, size: int) -> UInt8[np.ndarray, "height width 3"]:
    try:
        with Image.open(BytesIO(b64decode(encoded, validate=True)), formats=("PNG",)) as image:
            cell_size(*image.size, size=size)  # before a giant picture is unpacked
            pixels = np.array(image.convert("RGB"))
    except InputError:
        raise
    except Exception as error:  # Pillow: OSError, SyntaxError, ValueError, struct.error, ...
        raise InputError(
            f"img_c.image_b64 is no PNG that can be decoded ({type(error).__name__})"
        ) from error
    pixels[(pixels == WOOD_GREY).all(axis=-1)] = WOOD
    return pixels


def _check_shows(
    shown: Int8[np.ndarray, "row column"], written: Int8[np.ndarray, "row column"]
) -> None:
    for row, column in np.argwhere(shown != written):
        raise InputError(
            f"at row {row + 1}, column {column + 1} (counted from 1) the picture shows "
            f"{KINDS[shown[row, column]]}, str_c has {KINDS[written[row, column]]}"
        )


def _line(index: int, record: _Record) -> str:
    picture = BytesIO()
    Image.fromarray(render(record.board)).save(picture, "PNG")
    content = {
        "global_idx": index,
        "num_black": int(record.black),
        "img_c": {"format": "PNG", "image_b64": b64encode(picture.getvalue()).decode()},
        "str_c": _written(record.board.ravel(), STONES),
        "text_c": _written(record.string, LETTERS),
        "text_eq": _written(record.equal, LETTERS),
        "text_ie": _written(record.unequal, LETTERS),
        "question": QUESTION,
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _written(ids: Int8[np.ndarray, "pos"], alphabet: str) -> str:
    return "".join(alphabet[index] for index in ids)


def _other_strings(
    strings: Int8[np.ndarray, "example pos"],
    counts: Int[np.ndarray, "example"],
    *,
    entropy: tuple[int, ...],
    split: str,
) -> Int8[np.ndarray, "example pos"]:
    """Strings of the same counts, none equal to its partner."""
    others, same = strings.copy(), np.arange(len(strings))
    for attempt in range(1, 100):
        others[same] = draw_strings(
            counts[same], length=strings.shape[1], seed=(*entropy, attempt), split=split
        )
        same = np.flatnonzero((others == strings).all(axis=1))
        if not same.size:
            return others
    raise InputError(
        f"no second string with {counts[same[0]]} letters c of {strings.shape[1]} found in split "
        f"{split!r}: leave this count out"
    )


def _number_of_c(strings: Int8[np.ndarray, "example pos"]) -> Int[np.ndarray, "example"]:
    return (strings == C).sum(axis=1)


def _arrays(examples: Examples) -> tuple[np.ndarray, ...]:
    return (
        examples.counts,
        examples.boards,
        examples.strings,
        examples.equal,
        examples.unequal,
    )


def _known(world: World) -> str:
    spans = world.regimes.items()
    return ", ".join(f"{name} {counts[0]}..{counts[-1]}" for name, counts in spans)
