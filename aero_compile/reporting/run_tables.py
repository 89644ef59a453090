"""The numbers behind a report of runs as CSV, one value a row."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aero_compile.reporting.entropy_states import (
    QUARTILES,
    Limits,
    layer_collapse,
    layer_overload,
    overload,
    quartile_shares,
)
from aero_compile.reporting.run_figures import measured
from aero_compile.reporting.run_records import HEADWISE, RunRecords

Cells = Sequence[Any]


def csv_tables(runs: Sequence[RunRecords], limits: Limits) -> dict[str, str]:
    """Every number of the report as CSV texts by name; values that were not finite are `nan`."""
    tables: dict[str, tuple[Cells, Iterable[Cells]]] = {
        "runs": (
            ("run", "recipe", "state", "steps", "eval_loss", "perplexity", "overload", "overload_since"),
            _runs(runs, limits),
        ),
        "metrics": (("run", "step", "tokens", "metric", "value"), _metrics(runs)),
        "entropies": (("run", "step", "event", "split", "layer", "head", "entropy_nats"), _entropies(runs)),
        "quartiles": (("run", "step", *QUARTILES), _quartiles(runs)),
        "layers": (
            ("run", "layer", "overloaded_share", "overloaded_since", "collapsed_share", "collapsed_since"),
            _layers(runs, limits),
        ),
        "headwise": (("run", "step", "event", "quantity", "layer", "head", "value"), _headwise(runs)),
        "scalars": (("run", "step", "event", "parameter", "mean", "smallest", "largest"), _scalars(runs)),
        "activations": (("run", "step", "event", "place", "layer", "measure", "value"), _activations(runs)),
    }
    return {name: _csv(head, rows) for name, (head, rows) in tables.items()}


def _csv(head: Cells, rows: Iterable[Cells]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return stream.getvalue()


def _runs(runs: Sequence[RunRecords], limits: Limits) -> Iterator[Cells]:
    for run in runs:
        state = overload(measured(run)[1], run.max_entropy, limits)
        steps = max((m["step"] for m in run.metrics), default=0)
        last = [run.last("eval_loss"), run.last("perplexity")]
        yield run.name, run.recipe, run.status, steps, *last, state.value, state.since


def _metrics(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        for record in run.metrics:
            for key, value in record.items():
                if key not in ("step", "tokens", "time") and isinstance(value, (int, float)):
                    yield run.name, record["step"], record.get("tokens"), key, value


def _entropies(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        for record in run.entropies:
            start = (run.name, record["step"], record.get("event"), record.get("split"))
            yield from ((*start, *cell) for cell in _cells(record["entropies"]))


def _quartiles(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        yield from ((run.name, step, *quartile_shares(table)) for step, table in measured(run)[1])


def _layers(runs: Sequence[RunRecords], limits: Limits) -> Iterator[Cells]:
    for run in runs:
        tables = measured(run)[1]
        for layer in range(len(tables[0][1]) if tables else 0):
            states = [f(tables, layer, run.max_entropy, limits) for f in (layer_overload, layer_collapse)]
            yield run.name, layer, *(cell for state in states for cell in (state.value, state.since))


def _headwise(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        for record in run.parameters:
            for key in HEADWISE:
                start = (run.name, record["step"], record.get("event"), key)
                yield from ((*start, *cell) for cell in _cells(record.get(key, ())))


def _scalars(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        for record in run.parameters:
            for name, values in record.get("scalars", {}).items():
                yield run.name, record["step"], record.get("event"), name, *values


def _activations(runs: Sequence[RunRecords]) -> Iterator[Cells]:
    for run in runs:
        for record in run.activations:
            spectra = record.get("spectra", {})
            places = {**record, **{f"ffn_hidden_{side}": spectra.get(side) for side in ("before", "after")}}
            for place, measures in places.items():
                if place == "spectra" or not isinstance(measures, dict):
                    continue
                for measure, values in measures.items():
                    for layer, value in zip(record["layers"], values, strict=True):
                        yield run.name, record["step"], record.get("event"), place, layer, measure, value


def _cells(values: Iterable[Sequence[float]]) -> Iterator[Cells]:
    for layer, row in enumerate(values):
        for head, value in enumerate(row):
            yield layer, head, value if math.isfinite(value) else math.nan
