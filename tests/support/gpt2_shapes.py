"""GPT-2 at its real size without weights: the paper counts and prices these."""

from __future__ import annotations

import functools
import time

import torch

import aero_compile

SECONDS: dict[int, float] = {}
"""How long the capture of that many layers took, in seconds of this process."""


@functools.cache
def gpt2_shape(layers: int) -> aero_compile.TransformedModel:
    """GPT-2 small with that many layers, without weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    start = time.process_time()
    result = aero_compile.transform(model, "baseline")
    SECONDS[layers] = time.process_time() - start
    assert all(p.device.type == "meta" for p in result.parameters())
    return result
