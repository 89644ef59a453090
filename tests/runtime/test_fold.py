"""Folding scalars of the server: the same function with fewer private products."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from aero_compile import transform
from aero_compile.graphs.rewriting import tainted_nodes
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.runtime.fold import LARGEST, fold_scales
from tests import tiny_models

FAMILIES = ["gpt2-eager", "gpt_neox-sdpa", "llama-eager", "nanogpt"]


def trained(family: str, recipe: str, seed: int = 0, size: float = 1.0) -> TransformedModel:
    """A float64 model whose scales and temperatures are not at their initial values."""
    torch.manual_seed(seed)
    model = transform(tiny_models.captured(family), recipe).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("scaled_ffn"):
                parameter.copy_((torch.rand_like(parameter) + 0.5) * size)
            elif name.endswith("log_t"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def run(model: TransformedModel, graph: fx.Graph, ids: torch.Tensor) -> torch.Tensor:
    inputs = [ids if n.target == "input_ids" else torch.ones_like(ids) for n in graph.nodes if n.op == "placeholder"]
    return fx.Interpreter(model, graph=graph).run(*inputs)[0]  # type: ignore[no-any-return]


def products(graph: fx.Graph) -> int:
    live = tainted_nodes(graph, "input_ids")
    aten = torch.ops.aten
    return sum(node in live and node.target in (aten.mul.Tensor, aten.div.Tensor) for node in graph.nodes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["softmax_only", "SM+ScFFN", "scaled-ffn", "SM+R,scaled-ffn"])
def test_same_function_with_fewer_products(family: str, recipe: str) -> None:
    recipe = recipe.replace("SM+R", "strip-layer-norm,gelu-to-relu")
    model = trained(family, recipe)
    graph = model.logits_graph()
    folded = fold_scales(graph, model)
    ids = tiny_models.tokens()
    torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=1e-10, atol=1e-10)
    assert products(folded) < products(graph)


@pytest.mark.parametrize("family", ["gpt2-eager", "nanogpt"])
def test_scales_cost_nothing_without_norms(family: str) -> None:
    model = trained(family, "SM+ScFFN")
    plain = trained(family, "SM")
    assert products(fold_scales(model.logits_graph(), model)) == products(plain.logits_graph())


def test_a_graph_without_scalars_is_left_alone() -> None:
    model = trained("gpt2-eager", "SM+R")
    graph = model.logits_graph()
    assert fold_scales(graph, model) is graph


def test_a_scale_too_large_to_carry_is_applied() -> None:
    model = trained("gpt2-eager", "SM+ScFFN", size=LARGEST * 4)
    graph = model.logits_graph()
    folded = fold_scales(graph, model)
    ids = tiny_models.tokens()
    torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=1e-9, atol=1e-9)
