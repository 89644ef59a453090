"""Models whose logits change with the length of the text are told from those whose do not."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from aero_compile.decoding.step import require_same_prefixes
from aero_compile.errors import UnsupportedModelError
from aero_compile.inference_model import InferenceModel, inference_copy
from aero_compile.ir.rewriter import Rewriter
from tests.support.edited_decoders import edited
from tests.support.tiny_models import captured

aten = torch.ops.aten


def scaled_by_length(limit: int) -> InferenceModel:
    """A GPT-2 whose token vectors are divided by the length of the text, but at most by `limit`."""

    def divide(change: Rewriter, node: fx.Node) -> fx.Node:
        size = change.call(aten.sym_size.int, node, 1)
        return change.call(aten.div.Tensor, node, change.call(min, size, limit))

    return edited(divide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_causal_model_keeps_its_prefixes(dtype: torch.dtype) -> None:
    model = inference_copy(captured("llama-eager")).to(dtype)
    for length in (2, 3, 8):
        require_same_prefixes(model, 2, length)


def test_what_follows_from_the_length_of_the_text_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the logits of 2 tokens change by"):
        require_same_prefixes(scaled_by_length(1000), 2, 6)
    with pytest.raises(UnsupportedModelError, match=r"the logits of 1 tokens .* when 2 tokens follow"):
        require_same_prefixes(scaled_by_length(1000), 1, 3)


def test_a_limit_that_every_text_reaches_is_none() -> None:
    require_same_prefixes(scaled_by_length(2), 1, 7)
