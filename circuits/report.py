"""How is a study read? As one page that needs nothing else, and as tables in a terminal.

The page is a single HTML file without scripts: figures are inside it, it opens without a network,
follows the reader's choice of light or dark, and prints.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import rich.table
from jinja2 import Environment, StrictUndefined, Template
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from interp.errors import InputError

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_PNG = b"\x89PNG\r\n\x1a\n"
_GAP, _NARROW = 3, 14  # characters between columns, and for a column of words that is folded
_SCALE = 96 / 150  # figures have 150 dots an inch, pages 96


class Verdict(NamedTuple):
    """What a study says of one stage: its name, the verdict in a word, and why."""

    stage: str
    verdict: str
    reason: str


class Picture(NamedTuple):
    """A figure: the PNG file's bytes, what it shows for those who cannot see it, its caption."""

    png: bytes
    alt: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first column names the rows.

    Raises:
        InputError: a row has not one cell for each column.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise InputError(
                    f"row {number} of table {self.caption!r} has {len(row)} cells,"
                    f" there are {len(self.columns)} columns"
                )

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers, and so are set to the right; the first never does."""
        return tuple(
            place > 0 and any(map(_is_number, cells)) and all(map(_is_number_or_none, cells))
            for place, cells in enumerate(zip(*self.rows, strict=True))
        ) or (False,) * len(self.columns)


@dataclass(frozen=True)
class Section:
    """A part of a report: paragraphs, then tables, then figures.

    Raises:
        InputError: a figure that is not a PNG file, or without a text that tells what it shows.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[tuple[bytes, str, str]] = ()

    def __post_init__(self) -> None:
        for png, alt, caption in self.figures:
            if not png.startswith(_PNG):
                raise InputError(f"figure {caption!r} is not a PNG file")
            if not alt.strip():
                raise InputError(f"figure {caption!r} has no alt text: say what it shows")


def report_html(
    title: str,
    sections: Sequence[Section],
    *,
    facts: Mapping[str, str],
    verdicts: Sequence[tuple[str, str, str]] = (),
) -> str:
    """One self-contained HTML page.

    Args:
        title: of the page.
        sections: in order; they also make the table of contents.
        facts: how the results were made: model, data, command, ... as they are printed.
        verdicts: (stage, verdict, reason), shown first.
    """
    return _template().render(
        title=title,
        sections=sections,
        facts=facts,
        verdicts=[Verdict(*verdict) for verdict in verdicts],
    )


def print_table(console: Console, table: Table) -> None:
    """Print a table to a terminal; where it is narrow, an interval [..] goes below its number."""
    shown = rich.table.Table(
        title=Text(table.caption, style="bold"), title_justify="left", box=box.SIMPLE_HEAD
    )
    narrow = _least_width(table) > console.width
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        justify, whole = ("right", not narrow) if numeric else ("left", False)
        shown.add_column(Text(name), justify=justify, no_wrap=whole, overflow="fold")
    for row in table.rows:
        cells = [cell.replace(" [", "\n[") for cell in row] if narrow else row
        shown.add_row(*map(Text, cells))  # not strings: [brackets] would be read as markup
    console.print(shown)


def _least_width(table: Table) -> int:
    """Characters that a table needs when nothing but words is folded."""
    columns = zip(table.columns, *table.rows, strict=True)
    return sum(
        (max(map(cell_len, cells)) if numeric else _NARROW) + _GAP
        for cells, numeric in zip(columns, table.numeric, strict=True)
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(data_uri=_data_uri, shown_size=_shown_size)
    return environment.from_string(_TEMPLATE.read_text("utf-8"))


def _is_number(cell: str) -> bool:
    return re.match(r"[-+\u2212<>≤≥≈~]?\s*\.?\d", cell.strip()) is not None


def _is_number_or_none(cell: str) -> bool:
    return cell.strip() in ("", "-", "–", "—") or _is_number(cell)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _shown_size(png: bytes) -> tuple[int, int]:
    """Width and height on the page, from the PNG file's header."""
    return (
        round(int.from_bytes(png[16:20], "big") * _SCALE),
        round(int.from_bytes(png[20:24], "big") * _SCALE),
    )
