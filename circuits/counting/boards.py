"""What is counted: boards of black and white stones, and strings of letters with the same task.

A Go board of `size` x `size` cells; black stones are counted, white ones distract. The string form
has as many letters and counts `c`. Both as in "Unveiling the Visual Counting Bottleneck in
Vision-Language Models" (arXiv:2605.30170); the pictures equal its published generator's, pixel for
pixel. Train and test never share a board or a string.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, Int, Int8, Integer, Shaped, UInt8
from PIL import Image, ImageDraw

from interp.errors import InputError

EMPTY, BLACK, WHITE = 0, 1, 2  # kinds of cell
STONES = ".XO"  # how a board is written: its character at each kind
LETTERS = "abc"  # a string's letters at the ids 0, 1, 2
C = 2  # the letter that is counted

WOOD, INK, SNOW = (222, 184, 135), (0, 0, 0), (255, 255, 255)  # INK: lines and black stones
MIN_CELL, MAX_CELL = 5, 128  # pixels a cell; under 5 a black stone does not show on its lines
MAX_CELLS = 10_000_000  # cells that one call may ask for: 10 MB as int8
MAX_PIXELS = 100_000_000  # of one picture
TEST_BYTES = 32  # of 256: one board in eight is a test board


@dataclass(frozen=True)
class World:
    """The boards of one experiment, and which counts a model sees in which modality.

    `spread`: the number of white stones is black +- spread. Counts 0..`vision_max` are seen as
    pictures and as text, those up to `text_max` as text only, those of `further` (first and last)
    never.

    Raises:
        InputError: the regimes overlap or do not fit on the board.
    """

    size: int = 8
    spread: int = 5
    vision_max: int = 19
    text_max: int = 39
    further: tuple[int, int] = (40, 49)

    def __post_init__(self):
        cells = _cells(self.size)
        check_total(1, cells, f"board of {self.size}x{self.size}")
        _check_spread(self.spread, cells)
        first, last = self.further
        if not 0 <= self.vision_max < self.text_max < first <= last <= cells:
            raise InputError(
                f"World of {self.size}x{self.size}: vision_max {self.vision_max}, text_max "
                f"{self.text_max} and further {self.further} must satisfy "
                f"0 <= vision_max < text_max < further[0] <= further[1] <= {cells}"
            )

    @property
    def regimes(self) -> dict[str, range]:
        """Counts in distribution (`id`), of visual (`ve`) and of full extrapolation (`fe`)."""
        first, last = self.further
        return {
            "id": range(self.vision_max + 1),
            "ve": range(self.vision_max + 1, self.text_max + 1),
            "fe": range(first, last + 1),
        }

    @property
    def counts(self) -> tuple[int, ...]:
        """All counts of all regimes, ascending."""
        return tuple(count for regime in self.regimes.values() for count in regime)

    def regime_of(self, count: int) -> str | None:
        """The regime of a count; None between and beyond them."""
        return next((name for name, regime in self.regimes.items() if count in regime), None)


def draw_boards(
    counts: Shaped[np.ndarray, "example"],
    *,
    size: int,
    spread: int,
    seed: int | Sequence[int],
    split: str,
) -> Int8[np.ndarray, "example {size} {size}"]:
    """Boards with exactly `counts` black stones, drawn uniformly within their split.

    White stones: uniform over max(0, black - spread) .. black + spread, then cut to the cells that
    are left, as the published boards show. All stones lie at uniform places.

    Raises:
        InputError: impossible counts, size, spread, seed or split; more than 10 million cells; a
            count of which the split has no board (a full board exists once, in one of the splits).
    """
    cells, what = _cells(size), f"board of {size}x{size}"
    counts = _checked_counts(counts, cells, what)
    check_total(len(counts), cells, what)
    _check_spread(spread, cells)
    rng = generator(seed, stream=1)  # not at the places of the strings of this seed

    def propose(black: Int[np.ndarray, "draw"]) -> Int8[np.ndarray, "draw cell"]:
        fewest, most = np.maximum(black - spread, 0), black + spread
        white = np.minimum(rng.integers(fewest, most, endpoint=True), cells - black)
        place = np.arange(cells)
        stones = np.where(place < (black + white)[:, None], WHITE, EMPTY)
        kinds = np.where(place < black[:, None], BLACK, stones).astype(np.int8)
        return rng.permuted(kinds, axis=1)

    flat = _draw_in_split(counts, propose, (size, size), split, what)
    return flat.reshape(len(counts), size, size)


def draw_strings(
    counts: Shaped[np.ndarray, "example"], *, length: int, seed: int | Sequence[int], split: str
) -> Int8[np.ndarray, "example {length}"]:
    """Strings with exactly `counts` letters `c` at uniform places, drawn within their split.

    The other letters are fair coin flips of `a` and `b`.

    Raises:
        InputError: as `draw_boards`; a length under 1.
    """
    what = f"string of {length} letters"
    if length < 1:
        raise InputError(f"{what}: the length must be at least 1")
    counts = _checked_counts(counts, length, what)
    check_total(len(counts), length, what)
    rng = generator(seed, stream=2)

    def propose(number: Int[np.ndarray, "draw"]) -> Int8[np.ndarray, "draw pos"]:
        others = rng.integers(0, C, size=(len(number), length), dtype=np.int8)
        letters = np.where(np.arange(length) < number[:, None], np.int8(C), others)
        return rng.permuted(letters, axis=1)

    return _draw_in_split(counts, propose, (length,), split, what)


def generator(seed: int | Sequence[int], *, stream: int) -> np.random.Generator:
    """Random numbers of a seed; different streams of one seed are independent of each other.

    Raises:
        InputError: a seed that is no integer of at least 0 and no sequence of such.
    """
    entropy = [seed] if isinstance(seed, int) else list(seed)
    try:
        # numpy takes (1,) and (1, 0) for the same seed, hence the length
        return np.random.default_rng([stream, len(entropy), *entropy])
    except (TypeError, ValueError):
        raise InputError(
            f"seed {seed!r}: give an integer of at least 0, or a sequence of such"
        ) from None


def split_of(cells: Integer[np.ndarray, "*shape"]) -> str:
    """The split that a board or a string belongs to, whatever seed drew it.

    `test` when the first byte of the BLAKE2b hash of its shape and cells is below 32 (one in
    eight), else `train`.
    """
    return "test" if _is_test(cells.reshape(1, -1), cells.shape)[0] else "train"


def render(
    board: Integer[np.ndarray, "row column"], *, cell: int = 14
) -> UInt8[np.ndarray, "height width 3"]:
    """The picture of a board, RGB, `cell` pixels a cell.

    Wood, lines 2 pixels wide through the centres of the cells, stones. A stone's radius is 2/5 of a
    cell, rounded down: 5, 6 and 12 pixels at 14, 16 and 32, the sizes of the published pictures.

    Raises:
        InputError: a cell size outside 5..128, a board of other things than the three kinds of
            cell, or more than 100 million pixels.
    """
    _check_drawable(board, cell)
    rows, columns = board.shape
    image = Image.new("RGB", (columns * cell, rows * cell), WOOD)
    pen, middle, radius = ImageDraw.Draw(image), cell // 2, 2 * cell // 5
    for y in range(middle - 1, image.height, cell):  # Pillow's lines cover y and y + 1
        pen.line([(0, y), (image.width, y)], fill=INK, width=2)
    for x in range(middle - 1, image.width, cell):
        pen.line([(x, 0), (x, image.height)], fill=INK, width=2)
    for row, column in np.argwhere(board != EMPTY).tolist():
        x, y = column * cell + middle, row * cell + middle
        colour = INK if board[row, column] == BLACK else SNOW
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)
    return np.array(image)


@lru_cache(maxsize=8)
def cell_patches(cell: int = 14) -> UInt8[np.ndarray, "3 {cell} {cell} 3"]:
    """The picture of each kind of cell, read-only; a board's picture is these side by side."""
    kinds = np.array([EMPTY, BLACK, WHITE], dtype=np.int8)
    patches = np.stack([render(kind.reshape(1, 1), cell=cell) for kind in kinds])
    patches.setflags(write=False)
    return patches


def cell_size(width: int, height: int, *, size: int) -> int:
    """Pixels a cell of a picture of a `size` x `size` board.

    Raises:
        InputError: no picture of such a board has this size.
    """
    cell, left = divmod(width, _cells(size) // size)
    if width != height or left or not MIN_CELL <= cell <= MAX_CELL:
        raise InputError(
            f"the picture is {width}x{height} pixels; one of a {size}x{size} board has {size * 14}x"
            f"{size * 14}, or {size} times another whole number from {MIN_CELL} to {MAX_CELL}"
        )
    return cell


def read_board(
    pixels: UInt8[np.ndarray, "height width 3"], *, size: int
) -> Int8[np.ndarray, "{size} {size}"]:
    """The board that a picture shows: the inverse of `render`, at any cell size.

    Raises:
        InputError: the picture has another size, or a patch of it is no cell (says which row and
            column, counted from 1).
    """
    height, width, _ = pixels.shape
    cell = cell_size(width, height, size=size)
    # (row, y, column, x, channel) against one patch broadcast over rows and columns
    tiles = pixels.reshape(size, cell, size, cell, 3)
    shows = np.stack(
        [(tiles == patch[:, None]).all(axis=(1, 3, 4)) for patch in cell_patches(cell)]
    )
    if not shows.any(axis=0).all():
        row, column = np.argwhere(~shows.any(axis=0))[0] + 1
        raise InputError(
            f"row {row}, column {column} of the picture (counted from 1, {cell} pixels a cell) "
            f"shows neither an empty cell nor a black or white stone as `render` draws them"
        )
    return shows.argmax(axis=0).astype(np.int8)


def _draw_in_split(
    counts: Int[np.ndarray, "example"],
    propose: Callable[[Int[np.ndarray, "draw"]], Int8[np.ndarray, "draw cell"]],
    shape: tuple[int, ...],
    split: str,
    what: str,
) -> Int8[np.ndarray, "example cell"]:
    """Propose cells for every count, and again for those that fall into the other split."""
    if split not in ("train", "test"):
        raise InputError(f"unknown split {split!r}: choose 'train' or 'test'")
    cells = np.empty((len(counts), int(np.prod(shape))), dtype=np.int8)
    todo = np.arange(len(counts))
    # a test example takes 8 draws on average; (7/8)^2000 is 1e-116
    left = budget = 2000 + 200 * len(counts)
    while todo.size:
        if left <= 0:
            other = "train" if split == "test" else "test"
            raise InputError(
                f"no {what} with count {counts[todo[0]]} found in split {split!r} in {budget:,} "
                f"draws: too few exist; use split {other!r} or another count"
            )
        left -= todo.size
        drawn = propose(counts[todo])
        cells[todo] = drawn
        todo = todo[_is_test(drawn, shape) != (split == "test")]
    return cells


def _is_test(
    cells: Integer[np.ndarray, "example cell"], shape: tuple[int, ...]
) -> Bool[np.ndarray, "example"]:
    prefix = "x".join(map(str, shape)).encode() + b":"
    content, step = cells.astype(np.int8).tobytes(), cells.shape[1]
    starts = range(0, len(content), step)
    first = [blake2b(prefix + content[start : start + step]).digest()[0] for start in starts]
    return np.array(first, dtype=np.uint8) < TEST_BYTES


def _cells(size: int) -> int:
    if size < 1:
        raise InputError(f"a board of {size}x{size} cells: the size must be at least 1")
    return size * size


def check_total(examples: int, cells: int, what: str) -> None:
    """Refuse, with an InputError, more cells than one call may ask for."""
    if examples * cells > MAX_CELLS:
        raise InputError(
            f"{examples:,} times a {what} is {examples * cells:,} cells: at most {MAX_CELLS:,} at "
            f"once, ask for fewer or smaller ones"
        )


def _check_spread(spread: int, cells: int) -> None:
    if not 0 <= spread <= cells:
        raise InputError(f"spread {spread}: must be between 0 and the {cells} cells of the board")


def _check_drawable(board: Integer[np.ndarray, "row column"], cell: int) -> None:
    if not MIN_CELL <= cell <= MAX_CELL:
        raise InputError(f"{cell} pixels a cell: must be between {MIN_CELL} and {MAX_CELL}")
    if not 0 < board.size * cell**2 <= MAX_PIXELS:
        rows, columns = board.shape
        raise InputError(
            f"a board of {rows}x{columns} cells at {cell} pixels a cell has "
            f"{board.size * cell**2:,} pixels: must be between 1 and {MAX_PIXELS:,}"
        )
    if not np.isin(board, (EMPTY, BLACK, WHITE)).all():
        raise InputError(
            f"a board holds {EMPTY} (empty), {BLACK} (black) and {WHITE} (white); this one goes "
            f"from {board.min()} to {board.max()}"
        )


def _checked_counts(
    counts: Shaped[np.ndarray, "example"], most: int, what: str
) -> Int[np.ndarray, "example"]:
    counts = np.asarray(counts)
    if counts.dtype.kind not in "iu" or counts.ndim != 1:
        raise InputError(
            f"counts must be whole numbers in one dimension, not {counts.dtype} of shape "
            f"{counts.shape}"
        )
    if counts.size and not 0 <= counts.min() <= counts.max() <= most:
        worst = counts.min() if counts.min() < 0 else counts.max()
        raise InputError(f"count {worst} for a {what}: must be between 0 and {most}")
    return counts.astype(np.int64)
