"""HTML pages: style, figures and tables, and the report of a benchmark, each one file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from aero_compile.console import human_bytes
from aero_compile.files import write_atomically
from aero_compile.reporting import results
from aero_compile.reporting.plots import colour_variables, heatmap, line_chart, stacked_bars
from aero_compile.reporting.results import Row, cells, footnotes, row_name, savings

_COLOURS = (
    """
:root { color-scheme: light dark; --paper:#fdfdfc; --panel:#fff; --ink:#1d2126; --dim:#5b636d; --rule:#dfe3e8;
  --c0:#0b6fb8; --c1:#d1570a; --c2:#12866a; --c3:#a3478f; --c4:#8a6d00; --c5:#2a9bc7; --c6:#b3261e;
  --c7:#6b7280; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper:#14171b; --panel:#1b1f25; --ink:#e7eaee; --dim:#a3acb8;
  --rule:#343b45; --c0:#5db1f0; --c1:#ff9a52; --c2:#45c9a5; --c3:#dd8cca; --c4:#e0c04a; --c5:#7fd4f5;
  --c6:#ff8a80; --c7:#9aa3af; DARK } }
""".replace("LIGHT", colour_variables(dark=False)).replace("DARK", colour_variables(dark=True))
    + "".join(f".f{i} {{ fill:var(--c{i}); }} .l{i} {{ stroke:var(--c{i}); }}\n" for i in range(8))
)
_CHARTS = """
svg { width:100%; height:auto; font:12px system-ui, sans-serif; } svg text { fill:var(--ink); }
.grid { stroke:var(--rule); } .cell { stroke:var(--rule); } .mark { stroke:var(--dim); stroke-dasharray:2 3; }
svg polyline { fill:none; stroke-width:2; stroke-linejoin:round; } svg .thin { stroke-width:1.2; opacity:.75; }
svg .band { stroke:none; fill-opacity:.13; }
"""
_PAGE = """
* { box-sizing: border-box; }
body { margin:0 auto; padding:2rem 1.25rem 4rem; max-width:82rem; background:var(--paper); color:var(--ink);
  font:16px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size:1.7rem; line-height:1.2; margin:0 0 .3rem; } h2 { font-size:1.2rem; margin:2.4rem 0 .5rem; }
p { max-width:46rem; margin:.4rem 0 .8rem; } .dim, figcaption { color:var(--dim); font-size:.9rem; }
.lead { font-size:1.08rem; }
.notice { border-left:4px solid var(--c6); padding:.2rem 0 .2rem .8rem; overflow-wrap:anywhere; }
.scroll { overflow-x:auto; background:var(--panel); border:1px solid var(--rule); border-radius:8px; }
table { border-collapse:collapse; width:100%; font-size:.88rem; font-variant-numeric:tabular-nums; }
caption { text-align:left; padding:.6rem .8rem; color:var(--dim); }
th, td { padding:.45rem .7rem; text-align:right; white-space:nowrap; border-top:1px solid var(--rule); }
thead th { border-top:0; color:var(--dim); font-weight:600; } .left { text-align:left; }
td.ops { white-space:normal; min-width:9rem; overflow-wrap:anywhere; } .op { white-space:nowrap; margin-right:.6em; }
sup { font-size:.75em; line-height:0; }
.figures { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap:1rem; }
figure { margin:0; padding:.9rem; background:var(--panel); border:1px solid var(--rule); border-radius:8px; }
figure h3 { margin:0 0 .5rem; font-size:1rem; } .wide { max-width:56rem; }
.slider { display:flex; gap:.8rem; align-items:center; margin:.4rem 0; }
.slider input { flex:1; min-width:8rem; accent-color:var(--c0); } .slider output { min-width:7rem; }
details { margin:.6rem 0; } summary { cursor:pointer; }
summary:focus-visible, input:focus-visible { outline:2px solid var(--c0); outline-offset:2px; }
pre { overflow-x:auto; padding:.8rem; background:var(--panel); border:1px solid var(--rule);
  border-radius:8px; font-size:.8rem; } code { font-family:ui-monospace, Consolas, monospace; }
"""

# Draws the chosen frame of a heatmap into the rectangles of the last one, and keeps its place over a reload.
_SCRIPT = """
for (const box of document.querySelectorAll(".frames")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const slider = box.querySelector("input"), output = box.querySelector("output");
  const cells = [...box.querySelectorAll("rect.cell")], texts = [...box.querySelectorAll("text.value")];
  const colour = (value) => {
    const place = Math.min(1, Math.max(0, value / data.top)) * (data.map.length - 1);
    const low = Math.min(Math.floor(place), data.map.length - 2);
    return data.map[low].map((c, i) => Math.round(c + (data.map[low + 1][i] - c) * (place - low)));
  };
  const draw = () => {
    const values = data.frames[slider.value].flat();
    cells.forEach((cell, i) => {
      const known = values[i] !== null, rgb = known ? colour(values[i]) : null;
      cell.setAttribute("fill", known ? `rgb(${rgb})` : "none");
      const shown = known ? values[i].toFixed(2) : "NaN", title = cell.querySelector("title");
      title.textContent = title.textContent.replace(/: \\S+/, `: ${shown}`);
      if (!texts[i]) return;
      texts[i].textContent = shown;
      const light = known && 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 125;
      texts[i].style.fill = known ? (light ? "#111" : "#fff") : "currentColor";
    });
    output.textContent = data.labels[slider.value];
    slider.setAttribute("aria-valuetext", data.labels[slider.value]);
  };
  const key = `${location.pathname} ${box.dataset.key}`;
  try {
    const kept = data.labels.indexOf(sessionStorage.getItem(key));
    if (kept >= 0) { slider.value = kept; draw(); }
  } catch {}
  slider.addEventListener("input", () => {
    draw();
    try {
      if (+slider.value === data.labels.length - 1) sessionStorage.removeItem(key);
      else sessionStorage.setItem(key, data.labels[slider.value]);
    } catch {}
  });
}
"""


def figure(title: str, chart: str, caption: str = "", wide: bool = False) -> str:
    """Return a chart with its title and caption."""
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{"wide" if wide else ""}"><h3>{escape(title)}</h3>{chart}{note}</figure>'


def drawing(chart: str) -> str:
    """Return a chart as an SVG file of its own, in the page's colours, light or dark as whoever shows it.

    Raises:
        ValueError: nothing was drawn.
    """
    if not chart.startswith("<svg "):
        raise ValueError(f"no chart was drawn: {chart[:100]}")
    begin = chart.index(">") + 1
    head = chart[:begin].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    style = f"{_COLOURS}{_CHARTS}:root {{ background:var(--paper); }}"
    return f"{head}<style>{style}</style>{chart[begin:]}\n"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1, caption: str = "") -> str:
    """Return a table of plain texts with its caption below; the first `left` columns stand to the left."""
    kinds = ["" if i >= left else "left ops" if i else "left" for i in range(len(head))]
    out = ['<div class="scroll"><table><thead><tr>']
    out += [f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(head, kinds, strict=True)]
    out.append("</tr></thead><tbody>")
    for line in lines:
        cells = (f'<td class="{k}">{escape(c)}</td>' for c, k in zip(line, kinds, strict=True))
        out.append(f"<tr>{''.join(cells)}</tr>")
    out.append("</tbody></table></div>")
    return "".join([*out, f'<p class="dim">{escape(caption)}</p>' if caption else ""])


def shell(title: str, lead: str, body: str, *, script: bool = False, refresh: int | None = None) -> str:
    """Return a whole page. `script`: with what sliders need; `refresh`: seconds after which it loads itself anew."""
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{again}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_COLOURS}{_PAGE}{_CHARTS}</style></head><body>
<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>
<main>{body}</main>
{f"<script>{_SCRIPT}</script>" if script else ""}</body></html>
"""


def _name(row: Row, rows: Sequence[Row]) -> str:
    """Return a short name of a row that tells it from its neighbours."""
    several = len({r.seq_len for r in rows}) > 1
    return row_name(row, rows) + (f", T={row.seq_len}" if several else "")


def _ops(census: str) -> str:
    """Return the paper's census text with superscripts, to be broken between two kinds of op only."""
    kinds = [re.sub(r"R\^\{([^}]*)\}", r"R<sup>\1</sup>", escape(op)) for op in re.split(r" (?=\w+:)", census)]
    return " ".join(f'<span class="op">{kind}</span>' for kind in kinds)


def _main_table(rows: Sequence[Row]) -> str:
    head, lines = cells(rows)
    kinds = ["left", "left ops"] + [""] * (len(head) - 2)
    out = ['<div class="scroll"><table><caption>One private forward pass each. Savings count bytes against the ']
    out.append("first row of the same model, length and protocol. Errors compare logits with float32 PyTorch; ")
    out.append("argmax is the share of positions with the same most likely token. ")
    out.append(escape(" ".join(f"{line}." for line in footnotes(rows))))
    out.append("</caption><thead><tr>")
    out += [f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(head, kinds, strict=True)]
    out.append("</tr></thead><tbody>")
    for line in lines:
        out.append(f'<tr><th scope="row" class="left">{escape(line[0])}</th>')
        out.append(f'<td class="left ops">{_ops(line[1])}</td>')
        out += [f"<td>{escape(c)}</td>" for c in line[2:]]
        out.append("</tr>")
    return "".join([*out, "</tbody></table></div>"])


def _summary(rows: Sequence[Row]) -> str:
    if not rows:
        return "No row was measured."
    best = max(range(len(rows)), key=lambda i: savings(rows)[i])
    row, saving = rows[best], savings(rows)[best]
    if saving <= 1.0:
        return f"{len(rows)} rows; none moves fewer bytes than the first."
    first = next(r for r in rows if r.group == row.group)
    return (
        f"{row.label} moves {human_bytes(row.bytes)} where {first.label} moves {human_bytes(first.bytes)}: "
        f"{saving:.2f} times fewer bytes for the same tokens."
    )


def _training(rows: Sequence[Row]) -> str:
    trained = [(_name(r, rows), r.training) for r in rows if r.training is not None]
    if not trained:
        return ""
    train = {name: t.train_loss for name, t in trained}
    held_out = {name: t.eval_loss for name, t in trained if t.eval_loss}
    out = ['<section><h2>Training</h2><div class="figures">']
    caption = "Cross entropy in nats per token, without the entropy penalty."
    out.append(figure("Training loss", line_chart(train, "Training loss", "step", "nats per token"), caption))
    if held_out:
        chart = line_chart(held_out, "Held-out loss", "step", "nats per token")
        out.append(figure("Held-out loss", chart, "On blocks that training never saw."))
    out.append("</div></section><section><h2>Attention entropy of every head</h2>")
    out.append("<p>Mean entropy of each head's attention in nats: 0 is a head that looks at one token only ")
    out.append("(collapse), the top of the scale one that looks at all alike (overload).</p>")
    out.append('<div class="figures">')
    for name, t in trained:
        for when, values in (("before training", t.entropy_before), ("after training", t.entropy_after)):
            if values:
                top = t.max_entropy or max((v for layer in values for v in layer), default=1.0)
                out.append(figure(f"{name}: {when}", heatmap(values, f"{name} {when}", top, "nats")))
    out.append("</div></section>")
    return "".join(out)


def _beside_paper(rows: Sequence[Row]) -> str:
    """Return bars of the paper's bytes and ours, one figure for each depth and length; empty where there are none."""
    groups: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.paper is not None:
            bars = groups.setdefault((row.layers, row.seq_len), {})
            bars[f"{row.label}: paper"] = {"paper": float(row.paper["comm_gb"])}
            bars[f"{row.label}: ours"] = {"ours": row.bytes / 1e9}
    if not groups:
        return ""
    source = next(row.paper["source"] for row in rows if row.paper is not None)
    kinds = {"estimated" if row.estimated else "measured" for row in rows if row.paper is not None}
    out = ["<section><h2>Beside the paper</h2>", f"<p>{escape(source)}. Ours are {' and '.join(sorted(kinds))}.</p>"]
    out.append('<div class="figures">')
    for (layers, length), bars in groups.items():
        name = f"{layers} layers, {length} tokens"
        out.append(figure(name, stacked_bars(bars, f"Bytes of the paper and ours, {name}", "GB")))
    head, lines = results.paper_cells(rows)
    out.append('</div><details><summary>The same as a table</summary><div class="scroll"><table><thead><tr>')
    kind = ["left" if i in results.WORDS else "" for i in range(len(head) - 2)] + ["left ops"] * 2
    out += [f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(head, kind, strict=True)]
    out.append("</tr></thead><tbody>")
    for line in lines:
        shown = [_ops(cell) if "ops" in k else escape(cell) for cell, k in zip(line, kind, strict=True)]
        out += ["<tr>", *(f'<td class="{k}">{cell}</td>' for cell, k in zip(shown, kind, strict=True)), "</tr>"]
    return "".join([*out, "</tbody></table></div></details></section>"])


def _operators(rows: Sequence[Row]) -> str:
    bars = {_name(r, rows): {op: n / 1e6 for op, n in r.per_op.items()} for r in rows if r.per_op}
    if not bars:
        return ""
    chart = stacked_bars(bars, "Bytes per operator", "MB, both directions")
    out = ["<section><h2>Where the bytes go</h2>", figure("Bytes per operator", chart, wide=True)]
    out.append("<details><summary>The same as a table</summary>")
    ops = sorted({op for bar in bars.values() for op in bar}, key=lambda op: -sum(b.get(op, 0) for b in bars.values()))
    out.append('<div class="scroll"><table><thead><tr><th scope="col" class="left">operator (MB)</th>')
    out += [f'<th scope="col">{escape(name)}</th>' for name in bars]
    out.append("</tr></thead><tbody>")
    for op in ops:
        out.append(f'<tr><th scope="row" class="left">{escape(op)}</th>')
        out += [f"<td>{bar[op]:,.3f}</td>" if op in bar else "<td>–</td>" for bar in bars.values()]
        out.append("</tr>")
    return "".join([*out, "</tbody></table></div></details></section>"])


def html(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
    """Return the whole report of a result document (`aero_compile.reporting.results.document`) as HTML text."""
    table = f'<section aria-label="Results">{_main_table(rows)}</section>'
    return page(result, _summary(rows), [table, _beside_paper(rows), _operators(rows), _training(rows)])


def page(result: Mapping[str, Any], lead: str, sections: Sequence[str]) -> str:
    """Return a page of a document: its title, one sentence, `sections` of HTML, and how it was made."""
    title = str(result.get("title", "Private inference"))
    machine = f"{result.get('cores', '?')} cores, seed {result.get('seed', '?')}"
    versions = ", ".join(f"{key} {value}" for key, value in dict(result.get("versions", {})).items())
    config = json.dumps(result.get("config", {}), indent=1, ensure_ascii=False, default=str)
    sections = [
        *sections,
        f"""<section><h2>How this was made</h2>
<pre><code>{escape(str(result.get("command", "")))}</code></pre>
<p class="dim">{escape(machine)}. {escape(versions)}.</p>
<details><summary>Configuration</summary><pre><code>{escape(config)}</code></pre></details></section>""",
    ]
    return shell(title, lead, "\n".join(sections))


def write_html(path: Path, rows: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Write the report of `rows` to `path` under a temporary name first."""
    write_atomically(path, html(rows, result))
