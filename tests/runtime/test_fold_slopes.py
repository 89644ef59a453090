"""Folding learned slopes into weights: the same function, and no product for each neuron."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx

from aero_compile import transform
from aero_compile.graphs.rewriting import tainted_nodes
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.runtime.fold import fold_scales
from aero_compile.runtime.fold_slopes import fold_slopes
from tests import tiny_models

aten = torch.ops.aten


def learned(family: str, recipe: str) -> TransformedModel:
    """A float64 model whose slopes and scales are not at their initial values."""
    model = transform(tiny_models.captured(family), recipe).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("leaky_relu", "scaled_ffn")):
                parameter.copy_(torch.rand(1, generator=generator) * 0.8 - (0.4 if "leaky" in name else -0.5))
    return model


def run(model: TransformedModel, graph: fx.Graph, ids: torch.Tensor) -> torch.Tensor:
    inputs = [ids if n.target == "input_ids" else torch.ones_like(ids) for n in graph.nodes if n.op == "placeholder"]
    return fx.Interpreter(model, graph=graph).run(*inputs)[0]  # type: ignore[no-any-return]


def count(graph: fx.Graph, target: object) -> int:
    live = tainted_nodes(graph, "input_ids")
    return sum(node in live and node.target is target for node in graph.nodes)


@pytest.mark.parametrize("family", ["gpt2-eager", "gpt_neox-sdpa", "opt-eager", "nanogpt"])
@pytest.mark.parametrize("learn", ["layer", "global"])
@pytest.mark.parametrize("others", ["", ",strip-layer-norm,scaled-ffn"])
def test_the_same_function_with_one_relu_a_layer(family: str, learn: str, others: str) -> None:
    model = learned(family, f"leaky-relu{{learn={learn}}}{others}")
    scaled = fold_scales(model.logits_graph(), model)
    folded = fold_slopes(scaled, model)
    for length in (1, 2, 13):
        ids = tiny_models.tokens(2, length)
        torch.testing.assert_close(run(model, folded, ids), run(model, scaled, ids), rtol=1e-10, atol=1e-10)
    assert count(scaled, aten.prelu.default) == count(folded, aten.relu.default) == tiny_models.LAYERS
    assert count(folded, aten.prelu.default) == 0
    assert count(folded, aten.mul.Tensor) == count(scaled, aten.mul.Tensor)
    assert count(folded, aten.linear.default) == count(scaled, aten.linear.default)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama-eager", "leaky-relu{learn=layer}"),  # a product reads it
        ("gpt2-eager", "leaky-relu{learn=layer},gelu-to-identity{keep_fraction=0.5}"),  # a join reads it
    ],
)
def test_what_no_linear_layer_reads_stays(family: str, recipe: str) -> None:
    model = learned(family, recipe)
    graph = model.logits_graph()
    folded = fold_slopes(graph, model)
    assert count(folded, aten.prelu.default) == tiny_models.LAYERS
    ids = tiny_models.tokens()
    torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=0, atol=0)


def test_graphs_without_learned_slopes_are_left_alone() -> None:
    for recipe in ("baseline", "leaky-relu{slope=0.1}"):
        model = learned("gpt2-eager", recipe)
        graph = model.logits_graph()
        assert fold_slopes(graph, model) is graph


def test_the_graph_given_is_not_changed() -> None:
    model = learned("nanogpt", "leaky-relu{learn=global}")
    graph = model.logits_graph()
    text = str(graph)
    assert str(fold_slopes(graph, model)) != text
    assert str(graph) == text


@pytest.mark.parametrize("recipe", ["leaky-relu{slope=0.1}", "leaky-relu{learn=layer}"])
def test_in_two_processes(recipe: str) -> None:
    pytest.importorskip("spu")
    from aero_compile.runtime import private_inference

    model = learned("nanogpt", f"{recipe},strip-layer-norm").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    ids = tiny_models.tokens(1, 6)
    got, bill = private_inference(model, ids, "semi2k", warm=False)
    with torch.no_grad():
        expected = model(ids, ids)[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2)
    counts = {row["op"]: row["count"] for row in bill.per_op}
    assert counts["relu" if "learn" in recipe else "leaky_relu"] == tiny_models.LAYERS
    assert "prelu" not in counts
