"""Drawings as SVG, built element by element so that all text is escaped. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 28, 10, 14, 24
CHARACTER = 5.6
"""Approximate width of a label's character."""
COLOURS = 8


@dataclass(frozen=True)
class Drawing:
    """An SVG element as text, and its content in words."""

    markup: str
    words: str


@dataclass(frozen=True)
class Interval:
    """A row of :func:`intervals`: a value with its interval."""

    name: str
    value: float
    low: float
    high: float
    colour: str
    text: str


@dataclass(frozen=True)
class Line:
    """A line of :func:`lines`: place on the horizontal axis → least, middle and largest value there."""

    name: str
    colour: str
    points: Mapping[str, tuple[float, float, float]]


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return name → CSS class of its colour; the baseline is grey."""
    found: dict[str, str] = {}
    next_one = 0
    for name in dict.fromkeys(names):
        if name.startswith(("vanilla", "reference")):
            found[name] = "c-grey"
        else:
            found[name] = f"c{next_one % COLOURS}"
            next_one += 1
    return found


def intervals(title: str, rows: Sequence[Interval], unit: str, mark: float | None = None) -> Drawing:
    """Draw a point and a line for each row, one below the other, and a line at ``mark`` for comparison."""
    rows = [row for row in rows if all(map(math.isfinite, (row.value, row.low, row.high)))]
    name_width = min(150.0, 12 + CHARACTER * max((len(row.name) for row in rows), default=0))
    value_width = 10 + CHARACTER * max((len(row.text) for row in rows), default=0)
    left, right = name_width, WIDTH - value_width
    ends = [end for row in rows for end in (row.low, row.high)] + ([] if mark is None else [mark])
    least, most = _padded(min(ends, default=0.0), max(ends, default=1.0))
    height = 24 * len(rows) + 26

    def x(value: float) -> float:
        return left + (value - least) / (most - least) * (right - left)

    root = _root(height)
    for tick in _ticks(least, most, 3):
        _line(root, x(tick), 4, x(tick), height - 22, "grid")
        _text(root, x(tick), height - 8, f"{tick:g}", "tick", "middle")
    if mark is not None:
        _line(root, x(mark), 2, x(mark), height - 22, "mark")
    for number, row in enumerate(rows):
        y = 18 + 24 * number
        _text(root, left - 8, y + 4, _short(row.name, name_width), "label", "end")
        _line(root, x(row.low), y, x(row.high), y, f"stroke {row.colour}")
        for end in (row.low, row.high):
            _line(root, x(end), y - 4, x(end), y + 4, f"stroke {row.colour}")
        SubElement(root, "circle", cx=_n(x(row.value)), cy=_n(y), r="4.5", attrib={"class": f"fill {row.colour}"})
        _text(root, WIDTH - 2, y + 4, row.text, "value", "end")
    words = "; ".join(f"{row.name} {row.text}" for row in rows)
    return _drawing(root, f"{title}, {unit}: {words}")


def lines(title: str, series: Sequence[Line], places: Sequence[str], axis: str, highest: float, mark: float) -> Drawing:
    """Draw lines, each with a band, over an axis with this name; the vertical axis begins at zero."""
    height = 184
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def x(place: str) -> float:
        step = places.index(place) / max(1, len(places) - 1) if len(places) > 1 else 0.5
        return LEFT + 8 + step * (right - LEFT - 16)

    def y(value: float) -> float:
        return bottom - value / highest * (bottom - TOP)

    root = _root(height)
    for tick in _ticks(0, highest, 4):
        _line(root, LEFT, y(tick), right, y(tick), "grid")
        _text(root, LEFT - 6, y(tick) + 3.5, f"{tick:g}", "tick", "end")
    _line(root, LEFT, y(mark), right, y(mark), "mark")
    _text(root, right, TOP - 3, f"over {axis}", "tick", "end")
    every = -(-len(places) // 8)
    for number, place in enumerate(places):
        if number % every == 0:
            _text(root, x(place), bottom + 15, place, "tick", "middle")
    for line in series:
        points = [
            (x(place), *map(y, line.points[place]))
            for place in places
            if place in line.points and all(map(math.isfinite, line.points[place]))
        ]
        if len(points) > 1:
            band = [*((px, low) for px, low, _, _ in points), *((px, high) for px, _, _, high in reversed(points))]
            outline = " ".join(f"{_n(px)},{_n(py)}" for px, py in band)
            SubElement(root, "polygon", points=outline, attrib={"class": f"band {line.colour}"})
            middle = " ".join(f"{_n(px)},{_n(py)}" for px, _, py, _ in points)
            SubElement(root, "polyline", points=middle, attrib={"class": f"stroke {line.colour}"})
        for px, _, py, _ in points:
            SubElement(root, "circle", cx=_n(px), cy=_n(py), r="2.6", attrib={"class": f"fill {line.colour}"})
    last = [(line.name, list(line.points.values())[-1][1]) for line in series if line.points]
    words = ", ".join(f"{name} {value:.2f}" for name, value in last)
    return _drawing(root, f"{title}: at {places[-1] if places else 'no'} {axis} {words}")


def _root(height: float) -> Element:
    return Element("svg", viewBox=f"0 0 {WIDTH} {_n(height)}", role="img")


def _drawing(root: Element, words: str) -> Drawing:
    root.set("aria-label", words)
    return Drawing(tostring(root, encoding="unicode"), words)


def _line(root: Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    SubElement(root, "line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), attrib={"class": kind})


def _text(root: Element, x: float, y: float, text: str, kind: str, anchor: str) -> None:
    SubElement(root, "text", x=_n(x), y=_n(y), attrib={"class": kind, "text-anchor": anchor}).text = text


def _short(name: str, width: float) -> str:
    most = int((width - 8) / CHARACTER)
    return name if len(name) <= most else name[: most - 1] + "…"


def _padded(least: float, most: float) -> tuple[float, float]:
    margin = 0.08 * (most - least) or max(0.05 * abs(most), 0.05)
    return least - margin, most + margin


def _ticks(least: float, most: float, count: int) -> list[float]:
    """Return round numbers within a range."""
    rough = (most - least) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(least / step)
    return [round(step * number, 10) for number in range(first, math.floor(most / step) + 1)]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
