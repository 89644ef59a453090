"""Questions that libraries ask about values only to choose between kernels: answered without a look at the values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import transformer


@contextmanager
def without_hints() -> Iterator[None]:
    """Let `nn.TransformerEncoder` and `nn.TransformerDecoder` apply a mask as it is given.

    Unless `is_causal` says so, they compare the mask with a causal one, which tracing cannot do, to let attention
    use a kernel that knows such a mask by itself; the result is the same.
    """
    original = transformer._detect_is_causal_mask

    def as_given(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = as_given
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original
