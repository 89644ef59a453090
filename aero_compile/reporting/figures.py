"""Figures of training runs; those that the paper also has carry its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from aero_compile.reporting.entropy_states import QUARTILES, Table, quartile_shares
from aero_compile.reporting.pages import figure, table
from aero_compile.reporting.plots import Points, heatmap_over_time, line_chart, stacked_bars
from aero_compile.reporting.runs import Record, RunRecords
from aero_compile.training.run_directory import PLACES

_MOST_FRAMES = 200
_FIGURES_OF_SCALARS = {
    "scaled_ffn alpha": "FFN scaling factor α (Figure 14 (a) of the paper)",
    "scaled_ffn beta": "Scaling factor β of the FFN's residual (Figure 14 (b) of the paper)",
    "leaky_relu slope": "Negative slope of LeakyReLU (Figure 5 of the paper)",
}


def measured(run: RunRecords) -> tuple[str, list[tuple[int, Table]]]:
    """What entropies are shown: of the held-out blocks, or of training batches where those say more, with its name."""
    held_out: list[tuple[int, Table]] = list(run.held_out())
    batches: list[tuple[int, Table]] = [(r["step"], r["entropies"]) for r in run.entropies if r.get("split") == "train"]
    if len(held_out) >= min(5, len(batches)):
        return "held-out blocks", held_out
    return "training batches", batches


# -- all runs together --------------------------------------------------------------------------------------


def losses(runs: Sequence[RunRecords]) -> str:
    """Loss and perplexity over steps and over tokens, of all runs."""
    out = []
    highest = _readable_loss(runs)
    for over, x_label in (("step", "steps"), ("tokens", "training tokens")):
        lines: dict[str, Points] = {}
        tones, thin, marks = {}, set(), marks_of(runs) if over == "step" else {}
        for tone, run in enumerate(runs):
            for what, key in (("training", run.loss_key), ("held-out", "eval_loss")):
                name = _line(run, runs, what)
                lines[name] = [(x, y) for x, y in run.series(key, over) if y <= highest]
                tones[name] = tone if len(runs) > 1 else (what == "held-out")
            thin.add(_line(run, runs, "training"))
        left_out = any(y > highest for run in runs for key in (run.loss_key, "eval_loss") for _, y in run.series(key))
        notes = ["Cross entropy, without the entropy penalty; training is thin."]
        notes += [f"Values above {highest:.3g} are left out."] if left_out else []
        notes += [f"Dotted: {', '.join(marks.values())}."] if marks else []
        name = f"Loss over {x_label}"
        chart = line_chart(lines, name, x_label, "nats per token", tones=tones, thin=thin, marks=marks)
        out.append(figure(name, chart, " ".join(notes)))
        values = {line: [(x, math.exp(y)) for x, y in points if y < 700] for line, points in lines.items()}
        name = f"Perplexity over {x_label}"
        chart = line_chart(values, name, x_label, "perplexity", tones=tones, thin=thin, marks=marks, log=True)
        out.append(figure(name, chart, "exp(loss), on a logarithmic axis."))
    return "".join(out)


def _readable_loss(runs: Sequence[RunRecords]) -> float:
    """Twice the largest first loss: a run that diverges must not press all others to the bottom."""
    firsts = [y for run in runs for _, y in run.series(run.loss_key)[:1] if math.isfinite(y)]
    return 2 * max(firsts, default=math.inf)


def _line(run: RunRecords, runs: Sequence[RunRecords], what: str) -> str:
    return f"{run.name}: {what}" if len(runs) > 1 else what


def marks_of(runs: Sequence[RunRecords]) -> dict[float, str]:
    """Where a stage of a single run began, where it was resumed, or failed, by step."""
    if len(runs) > 1:
        return {}
    run = runs[0]
    begun = {float(s["step"]): f"stage {s['stage']} at step {s['step']}" for s in run.stages()}
    sessions = run.settings.get("sessions", [])
    steps = [s.get("step", 0) for s in sessions if isinstance(s, dict)] if isinstance(sessions, list) else []
    marks = begun | {float(step): f"resumed at step {step}" for step in steps if isinstance(step, int) and step > 0}
    if run.failure is not None:
        marks[float(run.failure["step"])] = f"stopped at step {run.failure['step']}"
    return marks


def course(runs: Sequence[RunRecords]) -> str:
    """How training went beside the loss: penalty, learning rate, gradients, speed."""
    kinds = {
        "penalty": ("Entropy penalty", "nats², before the weight λ", False),
        "distill_kl": ("Distillation: divergence from the teacher", "nats per token", False),
        "distill_hidden": ("Distillation: hidden values", "loss", False),
        "distill_attention": ("Distillation: attention", "loss", False),
        "learning_rate": ("Learning rate", "learning rate", False),
        "grad_norm": ("Norm of the gradients", "norm", True),
        "tokens_per_second": ("Speed", "training tokens per second", False),
    }
    out = []
    for key, (title, unit, log) in kinds.items():
        lines = {run.name: run.series(key) for run in runs}
        if any(lines.values()):
            tones = {run.name: tone for tone, run in enumerate(runs)}
            out.append(
                figure(title, line_chart(lines, title, "step", unit, log=log, tones=tones, marks=marks_of(runs)))
            )
    return "".join(out)


def stages(run: RunRecords) -> str:
    """What each stage of a removal did to the held-out loss, and how far training brought it back."""
    begun = run.stages()
    if not begun:
        return ""
    lines: dict[str, Points] = {
        "held-out": run.series("eval_loss"),
        "before the stage": [(s["step"], s["loss_before"]) for s in begun],
        "after its passes": [(s["step"], s["loss_after"]) for s in begun],
    }
    title = "Held-out loss over the stages"
    chart = line_chart(lines, title, "step", "nats per token", thin={"held-out"}, marks=marks_of([run]))
    rows = [
        [
            str(s["stage"]),
            f"{s['step']:,}",
            str(s.get("passes") or "none"),
            f"{s['loss_before']:.4f}",
            f"{s['loss_after']:.4f}",
        ]
        for s in begun
    ]
    head = ["stage", "from step", "passes", "loss before", "loss after"]
    return figure(
        title, chart, "Before and after: on the first 64 held-out blocks, without training in between."
    ) + table(head, rows, left=3)


def quartiles(runs: Sequence[RunRecords]) -> str:
    """Shares of heads by quartile of the observed maximum, before and after training."""
    bars: dict[str, dict[str, float]] = {}
    for run in runs:
        tables = measured(run)[1]
        for when, (step, heads) in ({"first": tables[0], "last": tables[-1]} if tables else {}).items():
            shares = quartile_shares(heads)
            label = f"{run.name}, step {step}" if len(runs) > 1 else f"step {step}"
            if when == "first" or step != tables[0][0]:
                bars[label] = {name: 100 * share for name, share in zip(QUARTILES, shares, strict=True)}
    if not bars:
        return ""
    title = "Figure 3 of the paper: share of heads by quartile of the observed maximum"
    chart = stacked_bars(bars, title, "% of heads", QUARTILES)
    caption = (
        "max is the largest entropy among all heads at that step. Figure 15 of the paper is the same for margins γ."
    )
    return figure(title, chart, caption, wide=True)


# -- one run ------------------------------------------------------------------------------------------------


def entropies(run: RunRecords) -> str:
    """Layerwise entropy with bands, headwise heatmaps over time, shares of heads by quartile over time."""
    where, tables = measured(run)
    if not tables:
        return ""
    marks = marks_of([run])
    lines = {_layer(i): [(s, _mean(t[i])) for s, t in tables] for i in range(len(tables[0][1]))}
    bands = {_layer(i): [(s, *_ends(t[i])) for s, t in tables] for i in range(len(tables[0][1]))}
    title = "Layerwise entropy over training"
    chart = line_chart(lines, title, "step", "entropy in nats", bands=bands, ordered=True, marks=marks)
    caption = (
        f"{_named_dynamics(run)}: the mean over the heads of each layer, from first (dark) to last; the band reaches "
        f"from the lowest head to the highest. On {where}; log T is {run.max_entropy:.2f} nats."
    )
    out = [figure(title, chart, caption)]
    title = "Figure 4 of the paper: entropy of every head"
    caption = f"On {where}. 0 is a head that looks at one token only; the top of the scale, log T, at all alike."
    chart = heatmap_over_time(frames_of(tables), title, run.max_entropy, "nats")
    out.append(figure(title, chart, caption))
    shares = [(step, quartile_shares(table)) for step, table in tables]
    over_time = {name: [(s, 100 * q[i]) for s, q in shares] for i, name in enumerate(QUARTILES)}
    title = "Share of heads by quartile over training"
    out.append(figure(title, line_chart(over_time, title, "step", "% of heads", ordered=True, marks=marks)))
    return "".join(out)


def _named_dynamics(run: RunRecords) -> str:
    """The figures of the paper that show entropy dynamics of such a recipe."""
    numbers = [12]
    if "leaky-relu" in run.recipe:
        numbers.append(6)
    if any(name in run.recipe for name in ("weight-norm", "spectral-norm", "scaled-ffn")):
        numbers.append(10)
    if run.setting("lambda"):
        numbers.append(16)
    *first, last = map(str, sorted(numbers))
    return f"Figures {', '.join(first)} and {last} of the paper" if first else f"Figure {last} of the paper"


def thresholds(run: RunRecords) -> str:
    """Learned thresholds θ of the regularization, by head and by layer."""
    tables = tables_of(run, "thresholds")
    if not tables:
        return ""
    title = "Figure 11 (a) of the paper: thresholds θ"
    caption = "Learned fractions of log T that the entropy of each head is drawn to."
    out = [figure(title, heatmap_over_time(frames_of(tables), title, 1.0, "of log T"), caption)]
    last = tables[-1][1]
    spread = [(i, _mean(row), _deviation(row)) for i, row in enumerate(last)]
    title = "Figure 11 (b) of the paper: thresholds by layer"
    chart = line_chart(
        {"mean over heads": [(i, mean) for i, mean, _ in spread]},
        title,
        "layer",
        "θ, a fraction of log T",
        bands={"mean over heads": [(i, mean - d, mean + d) for i, mean, d in spread]},
    )
    out.append(figure(title, chart, f"At step {tables[-1][0]}; the band is one standard deviation."))
    return "".join(out)


def temperatures(run: RunRecords) -> str:
    """Learned softmax temperatures, by head and by layer."""
    tables = tables_of(run, "temperatures")
    if not tables:
        return ""
    top = max((t for _, table in tables for row in table for t in row if t == t), default=1.0)
    title = "Softmax temperature of every head"
    caption = "Mean over positions; below 1 attention is sharper than without a temperature, above 1 more even."
    out = [figure(title, heatmap_over_time(frames_of(tables), title, top, "(temperature)"), caption)]
    rows = [i for i, row in enumerate(tables[0][1]) if row]
    lines = {_layer(i): [(s, _mean(t[i])) for s, t in tables] for i in rows}
    bands = {_layer(i): [(s, *_ends(t[i])) for s, t in tables] for i in rows}
    title = "Softmax temperature by layer"
    chart = line_chart(lines, title, "step", "temperature t", bands=bands, ordered=True, log=True)
    out.append(figure(title, chart, "Mean over heads; the band reaches from the lowest head to the highest."))
    return "".join(out)


def score_spreads(run: RunRecords) -> str:
    """How far the attention scores of each head spread, and those of each layer."""
    tables = tables_of(run, "score_spread")
    if not tables:
        return ""
    lines = {_layer(i): [(s, max(t[i])) for s, t in tables] for i, row in enumerate(tables[0][1]) if row}
    title = "Widest row of attention scores by layer"
    chart = line_chart(lines, title, "step", "spread of scores", ordered=True, marks=marks_of([run]))
    caption = "On held-out blocks: largest less smallest score of a row. It decides which exponential a layer needs."
    out = [figure(title, chart, caption)]
    top = max((s for _, table in tables for row in table for s in row if s == s), default=1.0)
    title = "Widest row of every head"
    out.append(figure(title, heatmap_over_time(frames_of(tables), title, top, "(spread)")))
    return "".join(out)


def scalars(run: RunRecords) -> str:
    """Scalars and vectors that passes added, over training; those of ScaledFFN also by layer, as the paper has them."""
    groups: dict[str, dict[str, list[tuple[int, list[float]]]]] = {}
    for record in run.parameters:
        for name, values in record.get("scalars", {}).items():
            group, line = parts_of_name(name)
            groups.setdefault(group, {}).setdefault(line, []).append((record["step"], values))
    out = []
    for group, lines in groups.items():
        title = _FIGURES_OF_SCALARS.get(group, group.replace("_", " "))
        unit = group.rpartition(" ")[2]
        drawn = {line: [(step, v[0]) for step, v in values] for line, values in lines.items()}
        vectors = any(v[1] != v[2] for values in lines.values() for _, v in values)
        bands = {line: [(s, v[1], v[2]) for s, v in values] for line, values in lines.items()} if vectors else None
        chart = line_chart(drawn, title, "step", unit, bands=bands, ordered=len(lines) > 1, marks=marks_of([run]))
        caption = "Mean; the band reaches from the smallest value to the largest." if vectors else ""
        out.append(figure(f"{title}, over training" if group.startswith("scaled_ffn ") else title, chart, caption))
        if group.startswith("scaled_ffn "):
            last = {f"step {max(s for s, _ in drawn[line])}" for line in drawn}
            final: Points = [(i, points[-1][1]) for i, points in enumerate(drawn.values())]
            out.append(figure(title, line_chart({" ".join(sorted(last)): final}, title, "layer", unit)))
    return "".join(out)


def parts_of_name(name: str) -> tuple[str, str]:
    """The group of a learned scalar, and its line there: `scaled_ffn.3.alpha` is `("scaled_ffn alpha", "layer 3")`."""
    found = re.fullmatch(r"([^.]+)((?:\..+)?)\.([^.]+)", name)
    if found is None:
        return name, "all layers"
    kind, middle, leaf = found.groups()
    number = re.search(r"\.(\d+)(?=\.|$)", middle)
    if number is None:
        return f"{kind} {leaf}", middle.strip(".") or "all layers"
    rest = (middle[: number.start()] + middle[number.end() :]).strip(".")
    return " ".join(filter(None, (kind, rest, leaf))), _layer(int(number.group(1)))


def scales(run: RunRecords) -> str:
    """How large activations are, over training, and on the batch that failed."""
    records = [r for r in run.activations if r.get("event") != "failure" and "layers" in r]
    out = []
    for place, words in PLACES.items():
        rows = [(r["step"], r["layers"], r[place]["rms"]) for r in records if place in r]
        lines = _by_layer(rows)
        if lines:
            title = f"Scale of {words}"
            chart = line_chart(lines, title, "step", "root mean square", ordered=True, log=True, marks=marks_of([run]))
            out.append(figure(title, chart, "On held-out blocks."))
    failed = run.failure
    if failed is not None and "layers" in failed:
        out.append(_failed(failed, records))
    return "".join(out)


def _failed(failed: Record, records: Sequence[Record]) -> str:
    title = "Figure 7 (a) of the paper: layers with NaN"
    shares = {words: list(enumerate(_percent(failed[p]["non_finite"]))) for p, words in PLACES.items() if p in failed}
    caption = f"Values that are NaN or infinite on the batch of step {failed['step']}, in evaluation mode."
    found = figure(title, line_chart(shares, title, "FFN", "% of values not finite"), caption)
    lines = {f"step {failed['step']}, the batch that failed": list(enumerate(failed["stream"]["rms"]))}
    if records:
        lines[f"step {records[-1]['step']}, held-out"] = list(enumerate(records[-1]["stream"]["rms"]))
    title = "Scale of the stream before it failed"
    chart = line_chart(lines, title, "FFN", "root mean square of finite values", log=True)
    return found + figure(title, chart, "Layer by layer; values that are not finite are left out.")


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def spectra(run: RunRecords) -> str:
    """Spectral entropy and participation ratio of FFN activations."""
    out = []
    records = [r for r in run.activations if isinstance(r.get("spectra"), dict) and "before" in r["spectra"]]
    for kind, title, unit in (
        ("entropy", "Spectral entropy of FFN activations", "nats"),
        ("participation", "Participation ratio of FFN activations", "dimensions"),
    ):
        for side in ("before", "after"):
            rows = [(r["step"], r["spectra"]["layers"], r["spectra"][side][kind]) for r in records]
            name = f"{title}, {side} the activation"
            if rows:
                width, samples = records[-1]["spectra"]["width"], records[-1]["spectra"]["samples"]
                caption = f"Of the covariance of {min(width)} hidden values over {samples:,} held-out tokens."
                out.append(figure(name, line_chart(_by_layer(rows), name, "step", unit, ordered=True), caption))
    return "".join(out)


def _by_layer(rows: Iterable[tuple[int, Sequence[int], Sequence[float]]]) -> dict[str, list[tuple[float, float]]]:
    """Lines by layer of `(step, layers, values)`; a second FFN of a layer has a line of its own."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for step, layers, values in rows:
        seen: dict[int, int] = {}
        for layer, value in zip(layers, values, strict=True):
            seen[layer] = seen.get(layer, 0) + 1
            name = _layer(layer) + (f", FFN {seen[layer]}" if seen[layer] > 1 else "")
            lines.setdefault(name, []).append((step, value))
    return lines


def tables_of(run: RunRecords, key: str) -> list[tuple[int, Table]]:
    """`(step, [L][H])` of a quantity in `parameters.jsonl`, one for each step, all of the shape of the last."""
    found: Mapping[int, Table] = {r["step"]: r[key] for r in run.parameters if key in r}
    shape = [len(row) for row in list(found.values())[-1]] if found else []
    return [(step, table) for step, table in found.items() if [len(row) for row in table] == shape]


def frames_of(tables: Sequence[tuple[int, Table]]) -> list[tuple[str, Table]]:
    """At most so many frames that the file stays small, evenly spread, with the first and the last."""
    last = len(tables) - 1
    count = min(_MOST_FRAMES, len(tables))
    chosen = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    return [(f"step {tables[i][0]:,}", tables[i][1]) for i in chosen]


def _layer(number: int) -> str:
    return f"layer {number}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    return pstdev(values) if values and all(map(math.isfinite, values)) else math.nan


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values, default=math.nan), max(values, default=math.nan)
