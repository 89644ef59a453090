"""strip-layer-norm."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import aero_compile
from aero_compile.errors import UnsupportedGraphError
from aero_compile.passes.strip_layer_norm import StripLayerNorm
from tests import eager_references as eager
from tests import tiny_models
from tests.tiny_models import LAYERS, captured, source, tokens, transformed

aten = torch.ops.aten
NORMS = (aten.layer_norm.default, aten.rms_norm.default)


def count(model: aero_compile.TransformedModel) -> Counter[object]:
    return Counter(node.target for node in model.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", tiny_models.EVERY)
def test_every_norm_goes_and_nothing_else(name: str) -> None:
    before, model = count(captured(name)), transformed(name, "strip-layer-norm")
    after = count(model)
    assert all(after[norm] == 0 for norm in NORMS)
    for target in (
        aten.linear.default,
        aten.softmax.int,
        aten.gelu.default,
        aten.silu.default,
        aten.matmul.default,
    ):
        assert after[target] == before[target]
    final = 0 if name in ("functional", "encoder-pre", "encoder-post") else 1
    assert sum(before[norm] for norm in NORMS) == 2 * LAYERS + final
    assert model.reports[-1].modified


@pytest.mark.parametrize("name", ["gpt2-eager", "nanogpt", "llama-sdpa"])
def test_the_final_norm_can_stay(name: str) -> None:
    model = transformed(name, "strip-layer-norm{keep_final=True}")
    assert aero_compile.census(model, 16).total("layernorm") == 1
    assert aero_compile.census(model, 16).total("layernorm", final=False) == 0
    assert any("norm" in key or "ln_f" in key for key, _ in model.named_parameters())
    if name == "gpt2-eager":
        reference = eager.without_norms(source(name))
        reference.transformer.ln_f = source(name).transformer.ln_f  # type: ignore[union-attr]
        ids = tokens()
        assert torch.allclose(model(ids).logits, reference(ids).logits, rtol=1e-9, atol=1e-9)
    twice = aero_compile.transform(model, "strip-layer-norm{keep_final=True}")
    assert not twice.reports[-1].modified
    rest = aero_compile.transform(model, "strip-layer-norm")
    assert rest.reports[-1].modified
    assert aero_compile.census(rest, 16).total("layernorm") == 0


def test_keeping_a_final_norm_that_does_not_exist() -> None:
    model = transformed("functional", "strip-layer-norm{keep_final=True}")
    assert aero_compile.census(model, 16).total("layernorm") == 0


def test_norms_of_queries_and_keys_go_too() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    model = aero_compile.transform(tiny_models.randomize(Qwen3ForCausalLM(config)), "strip-layer-norm")
    assert aero_compile.census(model, 8).kinds == ("softmax", "silu")
    assert not any("norm" in key for key, _ in model.named_parameters())


def test_a_model_that_never_had_norms() -> None:
    class Plain(tiny_models.MinGPT):
        def __init__(self) -> None:
            super().__init__()
            self.ln_f = nn.Identity()  # type: ignore[assignment]
            for block in self.blocks:
                block.ln1, block.ln2 = nn.Identity(), nn.Identity()

    with pytest.raises(UnsupportedGraphError, match=r"no LayerNorm or RMSNorm.*Plain.*gelu, softmax"):
        aero_compile.transform(tiny_models.randomize(Plain()), "strip-layer-norm")


def test_what_it_says_about_itself() -> None:
    assert StripLayerNorm().name == "strip-layer-norm"
    assert not StripLayerNorm.preserves_numerics
    assert "→" in (__import__("sys").modules[StripLayerNorm.__module__].__doc__ or "")
