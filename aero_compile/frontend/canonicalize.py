"""Canonicalization: the many spellings that exported decoders use → one small set of ATen ops.

Before → after, in the order of the steps:
    values written into tensors                                   → masked_fill (aero_compile.frontend.writes)
    checks and functions of token ids that change no id           → gone (aero_compile.frontend.token_checks)
    complex numbers of hidden values                              → real and imaginary parts
                                                                    (aero_compile.frontend.complex_numbers)
    nan_to_num behind a softmax, rows of a mask that see nothing  → zeros in the rows of the product
                                                                    (aero_compile.frontend.empty_rows)
    fill values of masks (−inf, the smallest float of a dtype)    → −65504
    lerp, group_norm, log_softmax, padding with edges             → their parts (aero_compile.frontend.composites)
    copies, casts, view, mm, glu, clamp(min=0), max(x, dim), …    → gone, or one op (aero_compile.frontend.spellings)
    native_dropout, dropout with its flag baked in                → nn.Dropout modules
    scaled_dot_product_attention                                  → matmul, mul, where/add, softmax, dropout, matmul
    conv1d of one token                                           → linear
    matmul, addmm with a weight; addmm of others                  → linear; matmul + add
    linear(x, W) + s·linear(linear(x, A), B)                      → linear(x, W + s·BA) (aero_compile.frontend.adapters)
    one value that is computed twice                              → computed once (aero_compile.frontend.equal_nodes)
    (u·g)·sigmoid(g)                                              → u·(g·sigmoid(g)) (aero_compile.frontend.factors)
    arithmetic and choices that compute gelu, relu, …, LayerNorm, RMSNorm, softmax → the op itself
                                                                    (aero_compile.frontend.recognize)
    layer_norm and rms_norm with an ε of 10^12                    → (x − mean)·(γ/√ε) + β
                                                                    (aero_compile.frontend.linear_norms)
    softmax(s)·m/Σ softmax(s)·m with a mask m of 0 and 1          → softmax of s where m is 1
                                                                    (aero_compile.frontend.renormalized)
    softmax(cat([s, b]))[..., :-1]                                → attention_weights(s − b, "sink")
                                                                    (aero_compile.frontend.sinks)
    var, std, logsumexp that are left                             → their parts
    linear(x, W) + b                                              → linear(x, W, b)

Every rewrite preserves the function (to rounding; that of linear norms to a relative 10^-6). Casts between
floating-point types are dropped from live values, and masks and tables of another type are cast: the canonical graph
computes in the dtype of its weights, whatever that is, and half-precision kernels of softmax and the norms accumulate
in float32 on their own.
"""

from __future__ import annotations

from collections.abc import Callable

from aero_compile.frontend.adapters import join_adapters
from aero_compile.frontend.attention import decompose_attention
from aero_compile.frontend.complex_numbers import open_complex
from aero_compile.frontend.composites import open_composites, open_statistics
from aero_compile.frontend.convolutions import open_convolutions
from aero_compile.frontend.dropouts import make_dropouts
from aero_compile.frontend.empty_rows import open_empty_rows
from aero_compile.frontend.equal_nodes import recognize_merged
from aero_compile.frontend.factors import group_factors
from aero_compile.frontend.linear_norms import open_linear_norms
from aero_compile.frontend.products import make_linears, take_up_biases
from aero_compile.frontend.recognize import recognize
from aero_compile.frontend.renormalized import mask_before_softmax
from aero_compile.frontend.sinks import open_sinks
from aero_compile.frontend.spellings import bound_fills, unify_spellings
from aero_compile.frontend.token_checks import settle_token_checks
from aero_compile.frontend.writes import open_writes
from aero_compile.ir.constants import mark_constants
from aero_compile.model import TransformedModel

_STEPS: tuple[Callable[[TransformedModel], object], ...] = (
    open_writes,
    settle_token_checks,
    open_complex,
    open_empty_rows,
    bound_fills,
    open_composites,
    unify_spellings,
    make_dropouts,
    decompose_attention,
    open_convolutions,
    make_linears,
    join_adapters,
    group_factors,
    recognize,
    recognize_merged,
    open_linear_norms,
    mask_before_softmax,
    open_sinks,
    open_statistics,
    take_up_biases,
    mark_constants,
)


def canonicalize(model: TransformedModel) -> TransformedModel:
    """Rewrite the graph of a freshly captured `model` in place into canonical ops."""
    for step in _STEPS:
        step(model)
        model.graph_changed()
    return model
