"""Literals and tensors on their way into a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aero_compile.errors import LoweringError
from aero_compile.runtime.lowering.refusals import LARGEST


def checked_literal(value: Any) -> Any:
    """A literal argument of an operator, None for those that only say how PyTorch stores the result.

    Raises:
        LoweringError: the number does not fit.
    """
    if isinstance(value, float) and not abs(value) <= LARGEST:
        raise LoweringError(
            f"the literal {value} does not fit fixed-point numbers; only masks in front of a softmax may be infinite"
        )
    return None if isinstance(value, (torch.dtype, torch.device, torch.memory_format)) else value


def to_numpy(tensor: torch.Tensor, dtype: Any) -> npt.NDArray[Any]:
    """A copy, floats in `dtype`: what is compiled stays as it is when the model is trained on."""
    kind = getattr(torch, np.dtype(dtype).name) if tensor.is_floating_point() else tensor.dtype
    return np.asarray(tensor.detach().to("cpu", kind, copy=True, memory_format=torch.contiguous_format).numpy())
