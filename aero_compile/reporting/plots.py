"""Three small charts as inline SVG: lines (with bands), heatmap (over time), stacked bars.

Drawn here and not by a library: a page must open from a file without a network, print, and read without scripts, and
the libraries that draw as much bring megabytes of script into every file.

Colours of axes and series come from CSS variables of the page (`--ink`, `--rule`, `--c0` … `--c7`, and `--q0` …
`--q15` for series that have an order), so one drawing serves light and dark. Every chart is an image with a name and
a description for screen readers, and every mark carries a `<title>` that a pointer shows. All text is escaped here;
callers pass plain strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

_WIDTH = 640
_SERIES_COLOURS = 8
# Anchors of a perceptually even dark-to-light map; the ends stay legible on white and on black.
_MAP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
# Of lines that have an order, such as layers: a part of plasma each that stands out from white, or from black.
_ORDERED = {
    False: ((13, 8, 135), (126, 3, 168), (204, 71, 120), (236, 124, 60)),
    True: ((140, 100, 250), (214, 95, 170), (248, 149, 64), (240, 249, 33)),
}
_ORDERED_COLOURS = 16
_DASHES = ("", "7 4", "2 3", "10 3 2 3")
_MOST_POINTS = 1000
_FEW_POINTS = 40

Points = Sequence[tuple[float, float]]
_ids = count()


def _svg(height: float, name: str, description: str, body: str, width: float = _WIDTH) -> str:
    uid = f"chart{next(_ids)}"
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{1.4 * width:.0f}px" role="img"'
        f' aria-labelledby="{uid}-t {uid}-d">'
        f'<title id="{uid}-t">{escape(name)}</title><desc id="{uid}-d">{escape(description)}</desc>'
        f"{body}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers that cover `[low, high]`: steps of 1, 2 or 5 times a power of ten."""
    span = high - low or abs(high) or 1.0
    raw = span / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _legend(names: Sequence[str], y: float, paints: Sequence[_Paint], left: float = 8) -> tuple[str, float]:
    """Return the legend's marks and the height that it takes; wraps to new lines by estimated width."""
    parts, x, row = [], left, 0
    for paint, name in zip(paints, names, strict=True):
        width = 32 + 7.4 * len(name)
        if x + width > _WIDTH and x > left:
            x, row = left, row + 1
        at = y + 18 * row
        parts.append(f'<rect x="{x}" y="{at - 9:.0f}" width="11" height="11" rx="2" {paint.fill("")}/>')
        parts.append(_text(x + 16, at, name))
        x += width
    return "".join(parts), 18 * (row + 1)


def colour_variables(dark: bool) -> str:
    """CSS variables `--q0` … `--q15` of series that have an order, for a page on white or on black."""
    steps = [_mixed(_ORDERED[dark], i / (_ORDERED_COLOURS - 1)) for i in range(_ORDERED_COLOURS)]
    return " ".join(f"--q{i}:{_hex(rgb)};" for i, rgb in enumerate(steps))


def _mixed(anchors: Sequence[tuple[int, int, int]], fraction: float) -> list[float]:
    place = min(1.0, max(0.0, fraction)) * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    return [a + (b - a) * (place - low) for a, b in zip(anchors[low], anchors[low + 1], strict=True)]


def _hex(rgb: Sequence[float]) -> str:
    return "#" + "".join(f"{round(c):02x}" for c in rgb)


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most about `most` of the points, among them both ends and the peaks of every stretch."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers that cover `[low, high]`, both positive, on a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps, stride = (1, 2, 5) if last - first <= 3 else (1,), max(1, (last - first) // 8)
    found = [m * 10.0**power for power in range(first, last + stride, stride) for m in steps]
    below = max((t for t in found if t <= low * (1 + 1e-9)), default=found[0])
    above = min((t for t in found if t >= high * (1 - 1e-9) and t > below), default=found[-1])
    return [t for t in found if below <= t <= above]


@dataclass(frozen=True)
class _Axes:
    """The frame of a line chart: where values lie, and the grid with its numbers."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    log: bool
    left: float = 64.0
    right: float = 26.0
    top: float = 10.0
    plot: float = 250.0

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return self.left + (value - low) / (high - low) * (_WIDTH - self.left - self.right)

    def y(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.log else float
        low, high = scale(self.y_ticks[0]), scale(self.y_ticks[-1])
        return self.top + (high - scale(value)) / (high - low) * self.plot

    def points(self, values: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)

    def drawn(self, x_label: str, y_label: str, marks: Mapping[float, str]) -> str:
        right, bottom = _WIDTH - self.right, self.top + self.plot
        body = [
            f'<line class="grid" x1="{self.left}" x2="{right}" y1="{self.y(y):.1f}" y2="{self.y(y):.1f}"/>'
            + _text(self.left - 6, self.y(y) + 4, f"{y:g}", "end")
            for y in self.y_ticks
        ]
        body += [_text(self.x(x), bottom + 17, f"{x:g}", "middle") for x in self.x_ticks]
        body.append(_text((self.left + right) / 2, bottom + 36, x_label, "middle"))
        middle = self.top + self.plot / 2
        body.append(_text(11, middle, y_label, "middle", f' transform="rotate(-90 11 {middle})"'))
        for x, what in marks.items():
            if self.x_ticks[0] <= x <= self.x_ticks[-1]:
                at = f"{self.x(x):.1f}"
                body.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{self.top}" y2="{bottom}">')
                body.append(f"<title>{escape(what)}</title></line>")
        return "".join(body)


def line_chart(
    series: Mapping[str, Points],
    name: str,
    x_label: str,
    y_label: str,
    *,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    ordered: bool = False,
    log: bool = False,
    tones: Mapping[str, int] | None = None,
    thin: Collection[str] = (),
    marks: Mapping[float, str] | None = None,
    loose: Collection[str] = (),
    names: Mapping[tuple[float, float], str] | None = None,
    written: Collection[tuple[float, float]] = (),
) -> str:
    """Draw one line per entry of `series` (points `(x, y)`; non-finite points are left out).

    `bands`: `(x, low, high)` around lines of the same name. `ordered`: colours from dark to light in the order of the
    series. `log`: a logarithmic axis, without the values that are not positive. `tones`: numbers of colours by series,
    for lines that belong together; `thin` are drawn thinner. `marks`: vertical lines at some x, with what they say.
    Series in `loose` are points without a line; `names`: of points, which a pointer shows instead of the series, and
    which stand beside those of them that are in `written`.
    """
    clean = {key: thinned([p for p in points if _drawable(p, log)]) for key, points in series.items()}
    clean = {key: points for key, points in clean.items() if points}
    if not clean:
        return '<p class="none">No values were recorded.</p>'
    around = {key: [b for b in (bands or {}).get(key, ()) if _drawable(b, log)] for key in clean}
    xs = [x for points in clean.values() for x, _ in points]
    ys = [y for points in clean.values() for _, y in points]
    ys += [y for band in around.values() for _, low, high in band for y in (low, high)]
    axes = _Axes(
        _whole_where_all_are(ticks(min(xs), max(xs), 6), xs), (log_ticks if log else ticks)(min(ys), max(ys)), log
    )
    body = [axes.drawn(x_label, y_label, marks or {})]
    paints = [_paint(i if tones is None else tones[key], len(clean), ordered) for i, key in enumerate(clean)]
    for (key, band), paint in zip(around.items(), paints, strict=True):
        if band:
            step = math.ceil(len(band) / _MOST_POINTS)
            upper = axes.points([(x, high) for x, _, high in band[::step]])
            lower = axes.points([(x, low) for x, low, _ in reversed(band[::step])])
            body.append(
                f'<polygon {paint.fill("band")} points="{upper} {lower}"><title>{escape(key)}</title></polygon>'
            )
    for (key, points), paint in zip(clean.items(), paints, strict=True):
        line = paint.line("thin" if key in thin else "")
        if key not in loose:
            body.append(f'<polyline {line} points="{axes.points(points)}"><title>{escape(key)}</title></polyline>')
        few = len(points) <= _FEW_POINTS and len(clean) <= _SERIES_COLOURS
        for x, y in points if few or key in loose else points[-1:]:
            tip = escape(f"{(names or {}).get((x, y), key)}: {y:.4g} at {x:g}")
            size = 3.5 if (x, y) == points[-1] or key in loose else 2
            place = f'cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="{size}"'
            body.append(f"<circle {paint.fill('')} {place}><title>{tip}</title></circle>")
    middle = (min(xs) + max(xs)) / 2
    for x, y in sorted(written):
        side, anchor = (7, "start") if x < middle else (-7, "end")
        body.append(_text(axes.x(x) + side, axes.y(y) - 6, (names or {})[x, y], anchor))
    legend, height = _legend(list(clean), axes.top + axes.plot + 60, paints)
    ends = "; ".join(f"{key} ends at {points[-1][1]:.4g}" for key, points in clean.items())
    about = f"{y_label} against {x_label}. {ends}."
    return _svg(axes.top + axes.plot + 50 + height, name, about, "".join(body) + legend)


def _whole_where_all_are(marks: list[float], xs: Sequence[float]) -> list[float]:
    """Leave out halves of steps and layers."""
    whole = [mark for mark in marks if float(mark).is_integer()]
    return whole if len(whole) > 1 and all(float(x).is_integer() for x in xs) else marks


def _drawable(values: Sequence[float], log: bool) -> bool:
    return all(map(math.isfinite, values)) and (not log or min(values[1:]) > 0)


@dataclass(frozen=True)
class _Paint:
    """The colour of a series: one of eight of the page, or its place in an order of sixteen."""

    tone: int
    ordered: bool
    dash: str = ""

    def fill(self, kind: str) -> str:
        if self.ordered:
            return f'class="{kind}" style="fill:var(--q{self.tone})"'
        return f'class="{f"f{self.tone} {kind}".strip()}"'

    def line(self, kind: str) -> str:
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        if self.ordered:
            return f'class="{kind}" style="stroke:var(--q{self.tone})"{dash}'
        return f'class="{f"l{self.tone} {kind}".strip()}"{dash}'


def _paint(number: int, of: int, ordered: bool = False) -> _Paint:
    if ordered:
        return _Paint(round((_ORDERED_COLOURS - 1) * number / max(1, of - 1)), True)
    return _Paint(number % _SERIES_COLOURS, False, _DASHES[number // _SERIES_COLOURS % len(_DASHES)])


def _shade(fraction: float) -> tuple[str, str]:
    """Return the cell colour of a fraction in [0, 1] and the text colour that reads on it."""
    rgb = _mixed(_MAP, fraction)
    light = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) > 125
    return _hex(rgb), "#111" if light else "#fff"


def heatmap(values: Sequence[Sequence[float]], name: str, top_value: float, unit: str) -> str:
    """Draw `values[layer][head]` on a colour scale from 0 to `top_value`, one row per layer."""
    columns = max((len(row) for row in values), default=0)
    if not columns:
        return '<p class="none">No values were recorded.</p>'
    left, top = 64.0, 18.0
    cell_w = min(64.0, (_WIDTH - left - 8) / columns)
    cell_h = min(34.0, max(16.0, cell_w))
    body = [_text(left - 8, top - 5, "head", "end")]
    for column in range(columns):
        body.append(_text(left + (column + 0.5) * cell_w, top - 5, str(column), "middle"))
    for index, row in enumerate(values):
        y = top + index * cell_h
        body.append(_text(left - 8, y + cell_h / 2 + 4, f"layer {index}", "end"))
        for column, value in enumerate(row):
            finite = math.isfinite(value)
            fill, ink = _shade(value / top_value if top_value > 0 else 0.0) if finite else ("none", "currentColor")
            shown = f"{value:.2f}" if finite else "NaN"
            x = left + column * cell_w
            tip = escape(f"layer {index}, head {column}: {shown} {unit}")
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell_w - 2:.1f}" height="{cell_h - 2:.1f}" rx="2" '
                f'fill="{fill}" class="cell"><title>{tip}</title></rect>'
            )
            if cell_w >= 34:
                at = x + cell_w / 2 - 1
                body.append(_text(at, y + cell_h / 2 + 3, shown, "middle", f' class="value" style="fill:{ink}"'))
    flat = [v for row in values for v in row if math.isfinite(v)]
    about = f"Rows are layers, columns heads, scale 0 to {top_value:.2f} {unit}."
    if flat:
        about += f" Values from {min(flat):.2f} to {max(flat):.2f}, mean {sum(flat) / len(flat):.2f}."
    below = top + len(values) * cell_h + 6
    width = max(left + columns * cell_w + 4, _LEAST_WIDTH)
    body.append(_colour_scale(left, below, width - left - 44, top_value, unit))
    return _svg(below + 30, name, about, "".join(body), width)


_LEAST_WIDTH = 320.0


def _colour_scale(x: float, y: float, width: float, top_value: float, unit: str) -> str:
    """The legend of a heatmap: its colours from 0 to the top."""
    steps = 24
    parts = [
        f'<rect x="{x + i * width / steps:.1f}" y="{y:.1f}" width="{width / steps + 0.5:.1f}" height="9" '
        f'fill="{_shade((i + 0.5) / steps)[0]}"/>'
        for i in range(steps)
    ]
    return "".join([*parts, _text(x, y + 22, "0"), _text(x + width, y + 22, f"{top_value:.3g} {unit}", "end")])


def heatmap_over_time(
    frames: Sequence[tuple[str, Sequence[Sequence[float]]]], name: str, top_value: float, unit: str
) -> str:
    """Draw the last of some heatmaps of one shape, with a slider through all of them (labels and values).

    Without scripts the last one is what is seen. The page needs `shell(script=True)`.
    """
    if not frames:
        return '<p class="none">No values were recorded.</p>'
    drawn = heatmap(frames[-1][1], name, top_value, unit)
    if len(frames) == 1:
        return drawn
    shown = [[[round(v, 3) if math.isfinite(v) else None for v in row] for row in values] for _, values in frames]
    data = {"labels": [label for label, _ in frames], "frames": shown, "map": _MAP, "top": top_value or 1.0}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    last, uid = len(frames) - 1, f"slider{next(_ids)}"
    return (
        f'<div class="frames" data-key="{escape(name)}">{drawn}<div class="slider">'
        f'<label for="{uid}">time</label><input id="{uid}" type="range" min="0" max="{last}" value="{last}" '
        f'aria-valuetext="{escape(frames[-1][0])}"><output for="{uid}">{escape(frames[-1][0])}</output></div>'
        f'<script type="application/json">{text}</script></div>'
    )


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]], name: str, unit: str, parts_in_order: Sequence[str] = ()
) -> str:
    """Draw one horizontal bar per entry, cut into its parts: the largest first, the smallest join as `other`.

    `parts_in_order`: parts that are to stand in this order, all of them, in colours that have an order too.
    """
    sums: dict[str, float] = {}
    for parts in bars.values():
        for part, value in parts.items():
            sums[part] = sums.get(part, 0.0) + value
    order = sorted((p for p in sums if sums[p] > 0), key=lambda p: -sums[p])
    if not order:
        return '<p class="none">No values were recorded.</p>'
    order = list(parts_in_order) or order
    kept = order if len(order) <= _SERIES_COLOURS else order[: _SERIES_COLOURS - 1]
    names = kept if len(kept) == len(order) else [*kept, "other"]
    paints = [_paint(i, len(names), bool(parts_in_order)) for i in range(len(names))]
    left = min(220.0, 16 + 7.0 * max(len(key) for key in bars))
    longest = max(sum(parts.values()) for parts in bars.values())
    marks = ticks(0, longest, 5)
    scale = (_WIDTH - left - 16) / marks[-1]
    bottom = 8 + 38 * len(bars)
    body = [
        f'<line class="grid" x1="{left + m * scale:.1f}" x2="{left + m * scale:.1f}" y1="4" y2="{bottom}"/>'
        + _text(left + m * scale, bottom + 15, f"{m:g}", "middle")
        for m in marks
    ]
    body.append(_text(left + marks[-1] * scale / 2, bottom + 33, unit, "middle"))
    told = []
    for index, (key, parts) in enumerate(bars.items()):
        y, x = 8 + 38.0 * index, left
        body.append(_text(left - 8, y + 18, key, "end"))
        shown = {part: parts.get(part, 0.0) for part in kept}
        if len(names) != len(kept):
            shown["other"] = sum(v for part, v in parts.items() if part not in kept)
        for paint, (part, value) in zip(paints, shown.items(), strict=True):
            if value <= 0:
                continue
            tip = escape(f"{key}, {part}: {value:.4g} {unit}")
            body.append(
                f'<rect {paint.fill("")} x="{x:.2f}" y="{y}" width="{value * scale:.2f}" height="26">'
                f"<title>{tip}</title></rect>"
            )
            x += value * scale
        told.append(f"{key}: {sum(parts.values()):.4g} {unit}")
    legend, height = _legend(names, bottom + 58, paints)
    return _svg(bottom + 48 + height, name, "; ".join(told) + ".", "".join(body) + legend)
