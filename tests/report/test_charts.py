"""Scales, charts and bars."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from shardtune.errors import JobError
from shardtune.report.bar_chart import draw_histogram, draw_stacks
from shardtune.report.chart_scale import bounds, round_ticks, short
from shardtune.report.line_chart import Chart, Line, Mark, chart_drawing, draw_chart
from shardtune.report.markup import Markup, element
from shardtune.report.plot_file import PICTURE_WIDTH, require_plot, write_plot
from shardtune.report.png import missing_for_png
from tests.report.pages import PageReader


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.93, 1.52, [1.0, 1.2, 1.4]),
        (-3, 12, [0, 5, 10]),
        (0, 8e-4, [0, 2e-4, 4e-4, 6e-4, 8e-4]),
        (5, 5, [5]),
        (0, 5e-324, [0]),
        (-1.7e308, 1.7e308, [-1.7e308]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 1]), (1, 3, [1, 2, 3]), (0, 12, [0, 5, 10]), (0, 2e6, [0, 5e5, 1e6, 1.5e6, 2e6])],
)
def test_steps_and_tokens_are_whole(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high, whole=True) == ticks


def test_numbers_are_short() -> None:
    values = (0, 0.123456, 1234.5, 12345, 2_500_000, 3e9, 2e-5)
    assert list(map(short, values)) == ["0", "0.1235", "1234", "12.35k", "2.5M", "3G", "2e-05"]


def test_an_axis_is_never_of_nothing() -> None:
    for values in ([], [0.0], [3.0, 3.0], [-1.0, 1.0]):
        low, high = bounds(values, from_zero=False)
        assert low < high
    assert bounds([2.0, 4.0], from_zero=True)[0] == 0


def test_text_is_escaped_and_markup_is_not() -> None:
    assert element("p", "a < b", Markup("<br>"), class_='"x"') == (
        '<p class="&quot;x&quot;">a &lt; b<br></p>'
    )


def test_a_chart_holds_its_values_and_marks() -> None:
    line = Line("loss", [(1, 2.0), (2, 1.5)], dots=True)
    page = PageReader(draw_chart(Chart("T", "step", "loss", [line], marks=[Mark(2, "here")])))
    (values,) = [each for tag, each in page.tags if "data-values" in each]
    assert values["data-values"] == "[[1.0,2.0],[2.0,1.5]]"
    assert page.count("circle") == 2
    assert "At step 2: here." in page.text("desc")[0]


def test_one_point_is_seen_in_the_middle() -> None:
    page = PageReader(draw_chart(Chart("T", "step", "loss", [Line("loss", [(7, 2.0)])])))
    (dot,) = [each for tag, each in page.tags if tag == "circle"]
    assert dot["cx"] == "206.0"  # of the plot from 52 to 360
    assert page.text("text")[-3:] == ["7", "step", "loss"]


def test_what_is_cut_off_is_said() -> None:
    line = Line("loss", [(1, 2.0), (2, 40.0), (3, 1.0)])
    note = "cut off: a loss of 40 at step 2"
    drawn = draw_chart(Chart("T", "step", "loss", [line], y_most=2.0, note=note))
    page = PageReader(drawn)
    assert max(float(text) for text in page.text("text")[:5]) <= 2.0
    (path,) = [each["d"] or "" for tag, each in page.tags if each.get("class") == "line c0"]
    heights = [float(each.split()[1]) for each in path[1:].split("L")]
    assert heights[1] == 10.0  # the top of the plot, and not above it
    assert heights[2] > heights[0] > heights[1]
    assert page.text("desc")[0].endswith(f"{note}.")


def test_a_label_stays_within_the_picture() -> None:
    points = [(0, 1.0), (12_500_000, 2.0)]
    page = PageReader(draw_chart(Chart("T", "tokens", "loss", [Line("loss", points)])))
    places = [float(each["x"] or 0) for tag, each in page.tags if each.get("class") == "x"]
    assert all(25 < place < 370 - 15 for place in places)


def test_a_legend_of_many_long_names_stays_within_the_picture(tmp_path: Path) -> None:
    names = [f"train.gradient_checkpointing=none, data.sequence_length={n}" for n in range(12)]
    lines = [Line(name, [(0, 1.0), (1, 2.0)], n, dashed=n >= 9) for n, name in enumerate(names)]
    drawing = chart_drawing(Chart("T", "step", "tokens/s", lines, wide=True))
    write_plot(tmp_path / "plot.svg", "Sweep", [drawing], [])
    page = PageReader((tmp_path / "plot.svg").read_text("utf-8"))
    texts = [each for tag, each in page.tags if tag == "text"]
    places = {
        said: (float(each["x"] or 0), float(each["y"] or 0))
        for each, said in zip(texts, page.text("text"), strict=True)
        if said in names
    }
    assert set(places) == set(names)
    assert len(set(places.values())) == len(names)
    assert all(x + 6 * len(said) < PICTURE_WIDTH for said, (x, _) in places.items())
    (inner,) = [each for tag, each in page.tags if tag == "svg" and "x" in each]
    assert float(inner["y"] or 0) > max(y for _, y in places.values())


def test_a_picture_as_png_has_its_words(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="needs the extra `png`")
    if missing := missing_for_png():
        pytest.skip(missing[0])
    drawing = chart_drawing(Chart("T", "step", "loss", [Line("loss", [(0, 1.0), (1, 2.0)])]))
    sizes = []
    for name, title in (("some.png", "Memory by class"), ("none.png", "")):
        write_plot(tmp_path / name, title, [drawing], [])
        found = (tmp_path / name).read_bytes()
        assert found.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">I", found[16:20]) == (2 * PICTURE_WIDTH,)
        sizes.append(len(found))
    assert sizes[0] > sizes[1]  # the title is drawn


def test_a_kind_that_is_not_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"SVG, PNG or HTML, not as \.pdf"):
        require_plot(tmp_path / "plot.pdf")


def test_bars() -> None:
    stacks = {"rank 0": {"compute": 3.0, "data": 1.0}, "rank 1": {"compute": 2.0}}
    page = PageReader(draw_stacks("Time", stacks, "s", ("data", "compute")))
    assert page.count("rect") == 4
    assert "rank 0: 4 s, of it data 25%, compute 75%." in page.text("desc")[0]
    page = PageReader(draw_histogram("Lengths", (1, 5, 2), 300, "tokens"))
    assert page.text("desc") == ["Most documents (5) have 100 to 200 tokens; the longest has 300."]
