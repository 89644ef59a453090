"""Three small charts as inline SVG: lines, heatmap, stacked bars.

Colours of axes and series come from CSS variables of the page (`--ink`, `--rule`, `--c0` … `--c7`),
so one drawing serves light and dark. Every chart is an image with a name and a description for screen
readers, and every mark carries a `<title>` that a pointer shows. All text is escaped here; callers pass
plain strings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count

_WIDTH = 640
_SERIES_COLOURS = 8
# Anchors of a perceptually even dark-to-light map; the ends stay legible on white and on black.
_MAP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
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


def _legend(names: Sequence[str], y: float, left: float = 8) -> tuple[str, float]:
    """Return the legend's marks and the height that it takes; wraps to new lines by estimated width."""
    parts, x, row = [], left, 0
    for index, name in enumerate(names):
        width = 32 + 7.4 * len(name)
        if x + width > _WIDTH and x > left:
            x, row = left, row + 1
        at = y + 18 * row
        parts.append(f'<rect x="{x}" y="{at - 9:.0f}" width="11" height="11" rx="2" class="f{index}"/>')
        parts.append(_text(x + 16, at, name))
        x += width
    return "".join(parts), 18 * (row + 1)


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], name: str, x_label: str, y_label: str) -> str:
    """Draw one line per entry of `series` (points `(x, y)`; non-finite points are left out)."""
    clean = {key: [p for p in points if all(map(math.isfinite, p))] for key, points in series.items()}
    clean = {key: points for key, points in clean.items() if points}
    if not clean:
        return '<p class="none">No values were recorded.</p>'
    xs = [x for points in clean.values() for x, _ in points]
    ys = [y for points in clean.values() for _, y in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 6), ticks(min(ys), max(ys), 5)
    left, right, top, plot = 56.0, 12.0, 10.0, 250.0
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (_WIDTH - left - right)

    def py(y: float) -> float:
        return top + (y1 - y) / (y1 - y0) * plot

    body = [
        f'<line class="grid" x1="{left}" x2="{_WIDTH - right}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        + _text(left - 6, py(y) + 4, f"{y:g}", "end")
        for y in y_ticks
    ]
    body += [_text(px(x), top + plot + 17, f"{x:g}", "middle") for x in x_ticks]
    body.append(_text(left + (_WIDTH - left - right) / 2, top + plot + 36, x_label, "middle"))
    middle = top + plot / 2
    body.append(_text(12, middle, y_label, "middle", f' transform="rotate(-90 12 {middle})"'))
    for index, (key, points) in enumerate(clean.items()):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        tone = index % _SERIES_COLOURS
        body.append(f'<polyline class="l{tone}" points="{path}"><title>{escape(key)}</title></polyline>')
        x, y = points[-1]
        tip = escape(f"{key}: {y:.4g} at {x:g}")
        body.append(f'<circle class="f{tone}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5"><title>{tip}</title></circle>')
    legend, height = _legend(list(clean), top + plot + 60)
    ends = "; ".join(f"{key} ends at {points[-1][1]:.4g}" for key, points in clean.items())
    return _svg(top + plot + 50 + height, name, f"{y_label} against {x_label}. {ends}.", "".join(body) + legend)


def _shade(fraction: float) -> tuple[str, str]:
    """Return the cell colour of a fraction in [0, 1] and the text colour that reads on it."""
    place = min(1.0, max(0.0, fraction)) * (len(_MAP) - 1)
    low = min(int(place), len(_MAP) - 2)
    rgb = [a + (b - a) * (place - low) for a, b in zip(_MAP[low], _MAP[low + 1], strict=True)]
    light = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) > 125
    return "#" + "".join(f"{round(c):02x}" for c in rgb), "#111" if light else "#fff"


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
                body.append(_text(at, y + cell_h / 2 + 3, shown, "middle", f' style="fill:{ink}"'))
    flat = [v for row in values for v in row if math.isfinite(v)]
    about = f"Rows are layers, columns heads, scale 0 to {top_value:.2f} {unit}."
    if flat:
        about += f" Values from {min(flat):.2f} to {max(flat):.2f}, mean {sum(flat) / len(flat):.2f}."
    return _svg(top + len(values) * cell_h + 4, name, about, "".join(body), left + columns * cell_w + 4)


def stacked_bars(bars: Mapping[str, Mapping[str, float]], name: str, unit: str) -> str:
    """Draw one horizontal bar per entry, cut into its parts; the smallest parts join as `other`."""
    sums: dict[str, float] = {}
    for parts in bars.values():
        for part, value in parts.items():
            sums[part] = sums.get(part, 0.0) + value
    order = sorted((p for p in sums if sums[p] > 0), key=lambda p: -sums[p])
    if not order:
        return '<p class="none">No values were recorded.</p>'
    kept = order if len(order) <= _SERIES_COLOURS else order[: _SERIES_COLOURS - 1]
    names = kept if len(kept) == len(order) else [*kept, "other"]
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
        for tone, (part, value) in enumerate(shown.items()):
            if value <= 0:
                continue
            tip = escape(f"{key}, {part}: {value:.4g} {unit}")
            body.append(
                f'<rect class="f{tone}" x="{x:.2f}" y="{y}" width="{value * scale:.2f}" height="26">'
                f"<title>{tip}</title></rect>"
            )
            x += value * scale
        told.append(f"{key}: {sum(parts.values()):.4g} {unit}")
    legend, height = _legend(names, bottom + 58)
    return _svg(bottom + 48 + height, name, "; ".join(told) + ".", "".join(body) + legend)
