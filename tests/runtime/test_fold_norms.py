"""Folding frozen norms into the linear layers that read them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import fx

from aero_compile import transform
from aero_compile.graphs.rewriting import tainted_nodes
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.runtime.fold_first_position import scale_first_position
from aero_compile.runtime.fold_norms import LARGEST, SMALLEST, fold_norms
from tests import tiny_models

aten = torch.ops.aten


@functools.cache
def _frozen(family: str, recipe: str) -> TransformedModel:
    source = tiny_models.captured(family)
    return transform(source, recipe, calibration=tiny_models.tokens(4, 19, seed=5)).eval()


def frozen(family: str, recipe: str = "freeze-layer-norm") -> TransformedModel:
    return copy.deepcopy(_frozen(family, recipe))


def run(model: TransformedModel, graph: fx.Graph, ids: torch.Tensor) -> torch.Tensor:
    inputs = [ids if n.target == "input_ids" else torch.ones_like(ids) for n in graph.nodes if n.op == "placeholder"]
    return fx.Interpreter(model, graph=graph).run(*inputs)[0].detach()  # type: ignore[no-any-return]


def count(graph: fx.Graph, *targets: object) -> int:
    live = tainted_nodes(graph, "input_ids")
    return sum(node in live and node.target in targets for node in graph.nodes)


def factors(model: TransformedModel, graph: fx.Graph, ids: torch.Tensor) -> list[torch.Tensor]:
    """What live products multiply by something that is not live."""
    live, found = tainted_nodes(graph, "input_ids"), []

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            if n in live and n.target is aten.mul.Tensor and not (n.args[0] in live and n.args[1] in live):
                found.append(self.fetch_args_kwargs_from_env(n)[0][0])
            return super().run_node(n)

    inputs = [ids if n.target == "input_ids" else torch.ones_like(ids) for n in graph.nodes if n.op == "placeholder"]
    Watch(model, graph=graph).run(*inputs)
    return found


@pytest.mark.parametrize("family", ["gpt2-eager", "gpt_neox-sdpa", "llama-eager", "nanogpt"])
@pytest.mark.parametrize("recipe", ["freeze-layer-norm", "freeze-layer-norm{first_token=True}"])
def test_the_same_function_without_means(family: str, recipe: str) -> None:
    model = frozen(family, recipe)
    graph = model.logits_graph()
    for length in (1, 2, 13):
        folded = fold_norms(graph, model)
        if length > 1:
            folded = scale_first_position(folded, model)
        ids = tiny_models.tokens(2, length)
        torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=1e-10, atol=1e-10)
    assert count(folded, aten.mean.dim) == 0
    left = 5 if "first_token" in recipe else 0  # of the first position
    sizes = {tuple(x.shape) for x in factors(model, folded, tiny_models.tokens(2, 13)) if x.shape[-1] == 32}
    assert sizes == ({(2, 1, 32)} if left else set())
    attention = count(transform(tiny_models.captured(family), "strip-layer-norm").logits_graph(), aten.mul.Tensor)
    assert count(folded, aten.mul.Tensor) == attention + left


def test_norms_that_were_cut_by_rows() -> None:
    model = frozen(
        "gpt2-eager", "freeze-layer-norm{norms=qk},strip-layer-norm{norms=ffn+v},freeze-layer-norm{norms=final}"
    )
    graph = model.logits_graph()
    folded = fold_norms(graph, model)
    ids = tiny_models.tokens()
    torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=1e-10, atol=1e-10)
    assert count(folded, aten.mean.dim) == 0


def test_real_norms_and_norms_that_the_residual_stream_reads_stay() -> None:
    for family, recipe in (("gpt2-eager", "baseline"), ("encoder-post", "freeze-layer-norm")):
        model = frozen(family, recipe)
        graph = model.logits_graph()
        folded = fold_norms(graph, model)
        kept = (aten.layer_norm.default, aten.mean.dim)
        last = family == "encoder-post"  # read by the head alone
        assert count(folded, *kept) == count(graph, *kept) - last > 0
        ids = tiny_models.tokens()
        torch.testing.assert_close(run(model, folded, ids), run(model, graph, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [LARGEST * 20, SMALLEST / 20])
def test_gains_that_do_not_fit_the_fixed_point_are_not_folded(size: float) -> None:
    model = frozen("llama-eager")
    with torch.no_grad():
        model.get_buffer("frozen_layer_norm.0.ffn.std").div_(size)
    folded = fold_norms(model.logits_graph(), model)
    plain = fold_norms(frozen("llama-eager").logits_graph(), model)
    assert count(folded, aten.mul.Tensor) == count(plain, aten.mul.Tensor)  # by value, not by shape
    whole = frozen("llama-eager")
    assert count(folded, aten.mul.Tensor) == count(fold_norms(whole.logits_graph(), whole), aten.mul.Tensor) + 1


def test_the_graph_given_is_not_changed() -> None:
    model = frozen("llama-eager")
    graph = model.logits_graph()
    text = str(graph)
    assert str(fold_norms(graph, model)) != text
    assert str(graph) == text
