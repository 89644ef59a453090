"""Refusal of flex_attention, by the settings of a model or when it is called, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from aero_compile.errors import UnsupportedModelError

CALLED = "a call of flex_attention"
"""The message of the exception that a call raises; `reasons` adds the place."""

FLEX = (
    "flex_attention{where}, whose masks are Python functions inside a compiled kernel: load a model of transformers "
    'with attn_implementation="eager"; elsewhere call F.scaled_dot_product_attention with a mask, or compute masked '
    "scores and their softmax"
)


def refuse_flex_attention(model: nn.Module) -> None:
    """Refuse a model of transformers whose attention, or that of a part, is to run as flex_attention.

    Raises:
        UnsupportedModelError: with the way out.
    """
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "flex_attention":
            where = f" at {name}" if name else ""
            raise UnsupportedModelError(f"{type(model).__name__} uses {FLEX.format(where=where)}")


@contextmanager
def flex_attention_refused() -> Iterator[None]:
    """Run functions inside torch.compile as they are written, and raise an exception where flex_attention is called.

    Compiled kernels of it are given the stand-ins for tensors that a capture runs on, and read their memory.
    """
    from torch._higher_order_ops.flex_attention import FlexAttentionHOP

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(CALLED)

    original = FlexAttentionHOP.__call__
    FlexAttentionHOP.__call__ = refuse  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        FlexAttentionHOP.__call__ = original  # type: ignore[method-assign]
