"""The census of an ONNX file: which nonlinear ops it holds, whoever wrote it, counted like those of a model."""

from __future__ import annotations

import os

from aero_compile.census import census
from aero_compile.census_result import Census
from aero_compile.errors import InputError
from aero_compile.onnx.graph import read_decoder


def onnx_census(path: str | os.PathLike[str], seq_len: int | None = None) -> Census:
    """Count the nonlinear ops of an ONNX file that holds a decoder; nothing is computed.

    The file may come from any exporter. It is read at one shape of the tokens, what depends on the tokens becomes the
    same graph of ATen ops that models are captured to, and the same recognition and the same count follow: LayerNorm,
    GELU or softmax written as arithmetic, and fused operators with several of them, are found as what they are.
    Operators that are not known are counted under their own names.

    Args:
        path: the file; weights that it keeps in other files must lie beside it.
        seq_len: T, in tokens. A file that is fixed to one length takes no other. None: that length, else 128, or the
            most tokens that the file takes.

    Raises:
        InputError: the file is missing, damaged or no ONNX, or cannot take T tokens.
        UnsupportedModelError: it holds no decoder-only transformer with softmax attention.
    """
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1):
        raise InputError(f"seq_len must be a whole number of at least 1, got {seq_len!r}")
    model = read_decoder(path, seq_len)
    assert model.fixed_shape is not None
    return census(model, model.fixed_shape[1])
