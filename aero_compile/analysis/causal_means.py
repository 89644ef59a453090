"""Public tables that average over all positions so far: row i is 1/(i+1) up to column i, and 0 behind it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from aero_compile.analysis.position_slicing import Sample
from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.ownership import server_nodes
from aero_compile.ir.weight_values import weight_value

aten = torch.ops.aten

_OFF = 1e-6


def causal_means(model: GraphModel, live: set[fx.Node], sample: Sample) -> set[fx.Node]:
    """The tables that products with live values read on their left, and that are such averages at this length.

    What the server alone knows is none of them, whatever it holds: a program would tell.
    """
    servers = server_nodes(model, model.graph)
    products = (node for node in model.graph.nodes if node.target is aten.matmul.default and node in live)
    tables = {node.args[0] for node in products if node.args[0] not in live and node.args[0] not in servers}
    ids = torch.ones(sample.batch, sample.length, dtype=torch.int64)
    known = {node: model.stand_in(str(node.target), ids) for node in model.graph.find_nodes(op="placeholder")}
    length = sample.length
    rows = torch.ones(length, length, dtype=torch.float64).tril() / torch.arange(1, length + 1)[:, None]
    return {table for table in tables if _is(weight_value(model, table, known), rows)}


def _is(value: object, rows: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape[-2:] != rows.shape or not value.is_floating_point():
        return False
    return bool((value.double() - rows).abs().max() <= _OFF)
