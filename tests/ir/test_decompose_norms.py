"""Deviation norms as arithmetic and back: the same function, for random shapes, sizes and parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from aero_compile.ir.custom_ops import deviation_norm
from aero_compile.ir.rewriter import decompose_deviation_norms, join_deviation_norms


def _graph(shape: tuple[int, ...], eps: float, centered: bool, form: str) -> fx.Graph:
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    graph.output(graph.call_function(deviation_norm, (x, list(shape), weight, bias, eps, centered, form)))
    return graph


def _run(graph: fx.Graph, *values: Tensor) -> Tensor:
    result: Tensor = fx.GraphModule(torch.nn.Module(), graph)(*values)
    return result


@pytest.mark.parametrize("form", ["added", "at_least"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_arithmetic_and_back(eps: float, centered: bool, form: str) -> None:
    generator = torch.Generator().manual_seed(int(1e6 * eps) + 2 * centered)
    for shape in ((5,), (3, 4)):
        values = torch.randn(2, 7, *shape, generator=generator, dtype=torch.float64)
        values[..., 1] *= 300
        weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        graph = _graph(shape, eps, centered, form)
        wanted = _run(graph, values, weight, bias)
        assert decompose_deviation_norms(graph)
        torch.testing.assert_close(_run(graph, values, weight, bias), wanted, rtol=1e-12, atol=1e-12)
        join_deviation_norms(graph)
        assert [node.target for node in graph.nodes].count(deviation_norm) == 1
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.sqrt.default)
        torch.testing.assert_close(_run(graph, values, weight, bias), wanted, rtol=1e-12, atol=1e-12)


def test_other_quotients_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    root = graph.call_function(torch.ops.aten.sqrt.default, (x,))
    graph.output(graph.call_function(torch.ops.aten.div.Tensor, (x, root)))
    before = str(graph)
    join_deviation_norms(graph)
    assert str(graph) == before
