"""The page stands alone and says all it was given; the terminal's table loses nothing."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

import circuits
from circuits.report import Picture, Section, Table, print_table, report_html
from interp.errors import InputError

ACCURACY = Table(
    "Share right, 95 % intervals",
    ["modality", "ID", "VE", "note"],
    [
        ["vision", "100.0 % [99.8, 100.0]", "0.0 % [0.0, 0.2]", "free"],
        ["text", "100.0 % [99.8, 100.0]", "–", "free"],
    ],
)
HOSTILE = '<script>alert("x")</script> & "quotes" {{ 1 + 1 }}'


def png(width=2.0, height=1.0) -> bytes:
    figure, buffer = Figure(figsize=(width, height)), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


class Page(HTMLParser):
    """Every element with its attributes, and the text within it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.open = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in ("meta", "link", "img"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]

    def texts(self, tag):
        return [element["text"].strip() for element in self.all(tag)]


def page(*sections, title="Where does it break?", **more) -> Page:
    more = {"facts": {}, **more}
    return Page(report_html(title, sections, **more))


def test_the_page_says_all_that_it_was_given():
    shown = page(
        Section("Accuracy", ["One.", "Two."], [ACCURACY], [(png(), "A flat line", "By count")]),
        Section("Masking"),
        facts={"model": "tiny", "command": "python -m circuits"},
        verdicts=[("Mapping", "supported", "Text names the count.")],
    )
    assert shown.texts("title") == shown.texts("h1") == ["Where does it break?"]
    assert shown.texts("h2") == ["Verdict", "Contents", "Accuracy", "Masking"]
    assert shown.texts("p") == ["One.", "Two."]
    assert shown.texts("dt") == ["Mapping supported", "model", "command"]
    assert shown.texts("dd") == ["Text names the count.", "tiny", "python -m circuits"]
    assert shown.texts("caption") == [ACCURACY.caption]
    assert shown.texts("figcaption") == ["By count"]
    heads = [(cell["scope"], cell["text"]) for cell in shown.all("th")]
    assert heads == [
        *(("col", name) for name in ACCURACY.columns),
        ("row", "vision"),
        ("row", "text"),
    ]
    assert shown.texts("td") == [cell for row in ACCURACY.rows for cell in row[1:]]


def test_the_contents_lead_to_each_section():
    shown = page(Section("One"), Section("One"), Section("Two"))
    targets = [element["id"] for element in shown.elements if "id" in element]
    assert len(targets) == len(set(targets))
    assert [(link["href"][1:] in targets, link["text"]) for link in shown.all("a")] == [
        (True, "One"),
        (True, "One"),
        (True, "Two"),
    ]


def test_the_page_reaches_for_nothing_outside():
    shown = page(Section("A", ["See https://example.org"], [ACCURACY], [(png(), "alt", "c")]))
    assert not shown.all("script")
    loaded = [e[key] for e in shown.elements for key in ("src", "href") if key in e]
    assert loaded and all(target.startswith(("data:", "#")) for target in loaded)
    style = shown.texts("style")[0]
    assert "url(" not in style and "@import" not in style
    assert not any(name.startswith("on") for element in shown.elements for name in element)
    policy = [meta.get("content") for meta in shown.all("meta") if "http-equiv" in meta]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_figures_are_inside_the_page_byte_for_byte_at_their_printed_size():
    content = png(5, 2.5)
    image = page(Section("A", figures=[Picture(content, "A flat line", "c")])).all("img")[0]
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == content
    assert (image["width"], image["height"]) == ("480", "240")  # 96 to the inch
    assert image["alt"] == "A flat line"


def test_what_looks_like_markup_is_text():
    table = Table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, HOSTILE]])
    shown = page(
        Section(HOSTILE, [HOSTILE], [table], [(png(), HOSTILE, HOSTILE)]),
        title=HOSTILE,
        facts={HOSTILE: HOSTILE},
        verdicts=[(HOSTILE,) * 3],
    )
    assert not shown.all("script")
    for tag in ("title", "h1", "p", "td", "dd", "caption", "figcaption"):
        assert HOSTILE in shown.texts(tag)
    assert shown.all("img")[0]["alt"] == HOSTILE


def test_numbers_stand_to_the_right_and_words_and_row_names_to_the_left():
    assert ACCURACY.numeric == (False, True, True, False)
    cells = {
        cell["text"]: cell.get("class") for cell in page(Section("A", (), [ACCURACY])).all("td")
    }
    assert cells["0.0 % [0.0, 0.2]"] == cells["–"] == "number"
    assert cells["free"] is None
    years = Table("c", ["count", "minus", "less", "gap"], [["19", "\u22121.5", "< .001", ""]])
    assert years.numeric == (False, True, True, False)


def test_a_table_without_rows_is_shown():
    assert page(Section("A", (), [Table("c", ["a", "b"], [])])).texts("th") == ["a", "b"]
    assert printed(Table("c", ["a", "b"], [])).split() == ["c", "a", "b", "─" * 7]


def test_a_verdict_is_said_in_words():
    shown = page(verdicts=[("Mapping", "excluded", "why")])
    assert shown.texts("strong") == ["excluded"]
    assert not shown.all("nav")


def test_broken_parts_are_refused():
    with pytest.raises(InputError, match="row 1 of table 'c' has 1 cells, there are 2 columns"):
        Table("c", ["a", "b"], [["1", "2"], ["3"]])
    with pytest.raises(InputError, match="'c' is not a PNG file"):
        Section("A", figures=[(b"GIF89a", "alt", "c")])
    with pytest.raises(InputError, match="'c' has no alt text"):
        Section("A", figures=[(png(), " ", "c")])


def test_a_study_needs_nothing_but_the_package():
    assert (Path(circuits.__file__).parent / "report.html.j2").is_file()


def printed(table: Table, width=100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 44, 60, 80, 120])
def test_the_terminal_loses_no_cell_however_narrow(width):
    words = [ACCURACY.caption, *ACCURACY.columns, *(cell for row in ACCURACY.rows for cell in row)]
    shown = re.sub(r"[\s─]", "", printed(ACCURACY, width))
    assert sorted(shown) == sorted("".join(words).replace(" ", ""))


def test_a_narrow_terminal_puts_the_interval_below_its_number():
    wide, narrow = printed(ACCURACY, 80), printed(ACCURACY, 60)
    assert "100.0 % [99.8, 100.0]" in wide
    assert re.search(r"100\.0 % +0\.0 % +free *\n +\[99\.8, 100\.0\] +\[0\.0, 0\.2\]", narrow)


def test_brackets_in_a_terminal_are_no_markup():
    assert "[red]x[/red]" in printed(Table("[b]c", ["a"], [["[red]x[/red]"]]))
    assert "[b]c" in printed(Table("[b]c", ["a"], []))
