"""Pictures of one run that show if the entropy penalty acts: its share of the loss, heads outside, theta and E."""

from __future__ import annotations

import math

from aero_compile.reporting.entropy_states import Table
from aero_compile.reporting.figures import frames_of, marks_of, tables_of
from aero_compile.reporting.pages import figure
from aero_compile.reporting.plots import Points, heatmap_over_time, line_chart
from aero_compile.reporting.runs import RunRecords
from aero_compile.training.penalty_watch import LEAST_SHARE

_FARTHEST = 3.0
"""Margins at the top of the scale of distances: what is farther away has the same colour."""


def penalty(run: RunRecords) -> str:
    """All pictures of the penalty; empty for a run without one."""
    return "".join([_share(run), _heads_outside(run), _weight(run), _against_thresholds(run), _distances(run)])


def _share(run: RunRecords) -> str:
    shares = [(step, 100 * share) for step, share in run.penalty_shares()]
    if not shares:
        return ""
    limit = [(step, 100 * LEAST_SHARE) for step, _ in (shares[0], shares[-1])]
    title = "Penalty share: lambda times the penalty, of the cross entropy"
    lines: dict[str, Points] = {"penalty share": shares, "1 %": limit}
    chart = line_chart(lines, title, "step", "% of the cross entropy", log=True, thin={"1 %"}, marks=marks_of([run]))
    zeros = sum(share == 0 for _, share in shares)
    caption = f"On a logarithmic axis. {zeros} of {len(shares)} points are 0: no head was outside of the margin."
    return figure(title, chart, caption if zeros else "On a logarithmic axis.")


def _heads_outside(run: RunRecords) -> str:
    counts = run.series("heads_outside")
    if not counts:
        return ""
    title = "Heads outside of the margin"
    chart = line_chart({"heads": counts}, title, "step", "heads", marks=marks_of([run]))
    heads = run.settings.get("heads")
    of = f" of {sum(heads)}" if isinstance(heads, list) and all(isinstance(count, int) for count in heads) else ""
    return figure(title, chart, f"Mean over the steps between two points{of}; only they are penalized.")


def _weight(run: RunRecords) -> str:
    weights = run.series("lambda")
    if not weights:
        return ""
    title = "Weight of the penalty, lambda"
    return figure(title, line_chart({"lambda": weights}, title, "step", "lambda", log=True, marks=marks_of([run])))


def _against_thresholds(run: RunRecords) -> str:
    """Each head of the last record: its threshold against its entropy, with the margin around the diagonal."""
    pairs, margin = _entropies_and_thresholds(run), _margin(run)
    if not pairs:
        return ""
    step, entropies, thresholds = pairs[-1]
    heads: dict[str, Points] = {
        f"layer {layer}": list(zip(*rows, strict=True))
        for layer, rows in enumerate(zip(entropies, thresholds, strict=True))
    }
    ends = [value for points in heads.values() for point in points for value in point if math.isfinite(value)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    title = "Threshold against entropy of every head"
    chart = line_chart(
        {**heads, "threshold = entropy": [(low, low), (high, high)]},
        title,
        "entropy, a fraction of the largest",
        "threshold theta",
        bands={"threshold = entropy": [(x, x - margin, x + margin) for x in (low, high)]},
        loose=set(heads),
        thin={"threshold = entropy"},
    )
    caption = f"At step {step:,}, on a training batch. The band is the margin gamma = {margin:g}: heads in it are free."
    return figure(title, chart, caption)


def _distances(run: RunRecords) -> str:
    """The distance of each head from its threshold over time, in margins."""
    pairs, margin = _entropies_and_thresholds(run), _margin(run)
    if not pairs or not margin:
        return ""
    far = [
        (step, [[abs(e - t) / margin for e, t in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)])
        for step, *tables in pairs
    ]
    title = "Distance of every head from its threshold"
    chart = heatmap_over_time(frames_of(far), title, _FARTHEST, "margins")
    return figure(title, chart, "Above 1 a head is outside of the margin and penalized; below, it is free.")


def _entropies_and_thresholds(run: RunRecords) -> list[tuple[int, Table, Table]]:
    """`(step, entropies, thresholds)` of each record that has both, `[L][H]`, fractions of the largest entropy."""
    entropies, thresholds = dict(tables_of(run, "relative_entropies")), dict(tables_of(run, "thresholds"))
    common = [(step, entropies[step], thresholds[step]) for step in entropies if step in thresholds]
    return [pair for pair in common if list(map(len, pair[1])) == list(map(len, pair[2]))]


def _margin(run: RunRecords) -> float:
    gamma = run.setting("gamma")
    return float(gamma) if isinstance(gamma, (int, float)) and math.isfinite(gamma) and gamma > 0 else 0.0
