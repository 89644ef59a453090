"""Folding frozen norms into the linear layers that read them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from aero_compile.graphs.rewriting import tainted_nodes
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.inference.fold_first_position import fold_first_position
from aero_compile.inference.fold_norms import fold_norms
from aero_compile.inference.model import inference_copy
from aero_compile.inference.readers import LARGEST, SMALLEST
from tests import tiny_models
from tests.inference.folding import assert_same, aten, check, count, trained

FAMILIES = ["gpt2-eager", "gpt_neox-sdpa", "llama-eager", "nanogpt"]


def factor_shapes(model: TransformedModel, ids: torch.Tensor) -> set[tuple[int, ...]]:
    """Shapes of what live products as wide as the model multiply by something that is not live."""
    live, found = tainted_nodes(model.graph, model.convention.tokens), set()

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            if n in live and n.target is aten.mul.Tensor and not (n.args[0] in live and n.args[1] in live):
                found.add(tuple(self.fetch_args_kwargs_from_env(n)[0][0].shape))
            return super().run_node(n)

    inputs = [ids if i == 0 else torch.ones_like(ids) for i in range(len(model.graph.find_nodes(op="placeholder")))]
    Watch(model, graph=model.graph).run(*inputs)
    return {shape for shape in found if shape[-1] == tiny_models.WIDTH}


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_norms_cost_nothing(family: str) -> None:
    model = trained(family, "freeze-layer-norm")
    change = check(fold_norms, model)
    assert not change.left
    assert count(model, aten.mean.dim) == 0
    stripped = trained(family, "strip-layer-norm")
    assert count(model, aten.mul.Tensor) == count(stripped, aten.mul.Tensor)
    assert count(model, aten.linear.default) == count(stripped, aten.linear.default)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_position_alone_is_scaled(family: str) -> None:
    model = trained(family, "freeze-layer-norm{first_token=True}")
    check(fold_norms, model)
    check(fold_first_position, model)
    norms = 2 * tiny_models.LAYERS + 1
    stripped = trained(family, "strip-layer-norm")
    assert count(model, aten.mul.Tensor) == count(stripped, aten.mul.Tensor) + norms
    assert factor_shapes(model, tiny_models.tokens(2, 13)) == {(2, 1, tiny_models.WIDTH)}


def test_no_averages_of_the_first_position_nothing_to_cut() -> None:
    check(fold_first_position, trained("gpt2-eager", "freeze-layer-norm"), modified=False)


def test_norms_that_were_cut_by_rows() -> None:
    recipe = "freeze-layer-norm{norms=qk},strip-layer-norm{norms=ffn+v},freeze-layer-norm{norms=final}"
    model = trained("gpt2-eager", recipe)
    check(fold_norms, model)
    assert count(model, aten.mean.dim) == 0


def test_real_norms_stay() -> None:
    model = trained("gpt2-eager")
    check(fold_norms, model, modified=False)
    assert count(model, aten.layer_norm.default) == 2 * tiny_models.LAYERS + 1


def test_norms_that_the_residual_stream_reads_stay() -> None:
    model = trained("encoder-post", "freeze-layer-norm")
    before = count(model, aten.mean.dim)
    change = check(fold_norms, model)  # the last is read by the head alone
    assert count(model, aten.mean.dim) == before - 1
    assert len(change.left) == before - 1
    assert all("frozen norm" in text and "reads it, too" in text for text in change.left)


@pytest.mark.parametrize("size", [LARGEST * 20, SMALLEST / 20])
def test_gains_that_do_not_fit_the_fixed_point_are_not_folded(size: float) -> None:
    model = trained("gpt2-eager", "freeze-layer-norm")
    plain = inference_copy(model)
    with torch.no_grad():
        model.get_buffer("frozen_layer_norm.0.ffn.std").div_(size)
    change = check(fold_norms, model)
    fold_norms(plain)
    assert count(model, aten.mul.Tensor) == count(plain, aten.mul.Tensor) + 1
    assert len(change.left) == 1
    assert "largest gain" in change.left[0]


def test_weights_keep_their_type() -> None:
    model = trained("llama-eager", "freeze-layer-norm").float()
    reference = inference_copy(model)
    assert fold_norms(model).modified
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same(model, reference, tolerance=1e-4)


def test_one_token_is_lowered_without_empty_arrays() -> None:
    """With one token, what follows the first position is empty: no step of the private run reads or returns it."""
    pytest.importorskip("jax")
    from aero_compile.runtime.lowering.partition import partition
    from aero_compile.runtime.lowering.to_jax import lower

    model = trained("nanogpt", "freeze-layer-norm{first_token=True}")
    for run in (fold_norms, fold_first_position):
        assert run(model).modified
    live = lower(partition(model, model.logits_graph(), tiny_models.tokens(1, 1)))
    assert all(0 not in shape for step in live.steps for shape in step.shapes)
