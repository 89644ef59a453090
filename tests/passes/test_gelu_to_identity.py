"""gelu-to-identity."""

from __future__ import annotations

import pytest
import torch

import aero_compile
from tests import tiny_models
from tests.tiny_models import captured, tokens, transformed

aten = torch.ops.aten


@pytest.mark.parametrize("name", tiny_models.EVERY)
def test_every_activation_goes(name: str) -> None:
    model = transformed(name, "gelu-to-identity")
    assert aero_compile.census(model, 16).kinds == ("softmax", "layernorm")
    assert all(ffn.activations == () for ffn in model.structure.ffns)
    assert model.reports[-1].modified
    assert model.state_dict().keys() == captured(name).state_dict().keys(), "the weights all stay"


@pytest.mark.parametrize("name", ["gpt2-eager", "opt-eager", "nanogpt", "functional"])
def test_the_feed_forward_is_linear(name: str) -> None:
    """Seen from outside: the branch is additive and homogeneous in what it reads, up to its biases."""
    model = transformed(name, "gelu-to-identity")
    for ffn in model.structure.ffns:
        node = ffn.output
        passed = []
        while node is not ffn.inputs[0]:
            passed.append(node.target)
            (node,) = (parent for parent in node.all_input_nodes if parent in model.structure.live)
        assert set(passed) <= {aten.linear.default, aten.reshape.default}


def test_a_gate_becomes_a_product() -> None:
    """Llama: silu(a)·b → a·b."""
    model = transformed("llama-eager", "gelu-to-identity")
    for ffn in model.structure.ffns:
        (first, second) = ffn.inputs
        assert {user.target for user in first.users} == {user.target for user in second.users} == {aten.mul.Tensor}
    assert aero_compile.census(model, 16).kinds == ("softmax", "layernorm")


def test_dropout_inside_stays() -> None:
    model = transformed("encoder-pre", "gelu-to-identity").train()
    torch.manual_seed(0)
    first = model(tokens())
    assert not torch.equal(model(tokens()), first)
