"""Tables that average over all positions so far, among others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aero_compile.analysis.new_positions import causal_means
from aero_compile.analysis.position_slicing import Sample
from aero_compile.ir.dataflow import tainted_nodes
from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import node_values
from tests.support import tiny_models

aten = torch.ops.aten


def with_table(make: Callable[[Rewriter, Any], Any]) -> GraphModel:
    """GPT-2 whose embedding goes through a product with a table on its left, made for the number of tokens."""
    model = tiny_models.transformed("gpt2-eager", "baseline")
    embedding = model.structure.embedding
    change = Rewriter.after(embedding)
    tokens = next(iter(model.graph.find_nodes(op="placeholder")))
    table = make(change, change.call(aten.sym_size.int, tokens, 1))
    change.redirect(change.call(aten.matmul.default, table, embedding))
    model.graph_changed()
    return model


def found(model: GraphModel, length: int = 5) -> int:
    live = tainted_nodes(model.graph, model.convention.tokens)
    return len(causal_means(model, live, Sample(2, length, node_values(model, 2, length))))


def ones(change: Rewriter, length: Any) -> Any:
    return change.call(aten.tril.default, change.call(aten.ones.default, [length, length], dtype=torch.float64))


def mean(change: Rewriter, length: Any) -> Any:
    table = ones(change, length)
    return change.call(aten.div.Tensor, table, change.call(aten.sum.dim_IntList, table, [-1], True))


def test_averages_are_found_at_every_length() -> None:
    for length in (2, 5, 9):
        assert found(with_table(mean), length) == 1


@pytest.mark.parametrize(
    "other",
    [
        ones,
        lambda change, length: change.call(aten.mul.Tensor, mean(change, length), 1.001),
        lambda change, length: change.call(aten.tril.default, mean(change, length), -1),
        lambda change, length: change.call(aten.transpose.int, mean(change, length), 0, 1),
    ],
)
def test_other_tables_are_not(other: Callable[[Rewriter, Any], Any]) -> None:
    assert found(with_table(other)) == 0


def test_what_the_server_alone_knows_is_not() -> None:
    def held(change: Rewriter, length: Any) -> Any:
        nothing = change.call(aten.mul.Tensor, change.parameter("transformer.ln_f.weight"), 0.0)
        return change.call(aten.add.Tensor, mean(change, length), change.call(aten.sum.default, nothing))

    assert found(with_table(held)) == 0
