"""One case for every live operator: name -> (shape of x, range of x, function, parameters, buffers, 2PC error)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from aero_compile.ir.custom_ops import deviation_norm
from tests.support.runtime_graphs import TokenRows, aten


@dataclass(frozen=True)
class Case:
    """A live computation on x (uniform in [low, high]) and the error allowed in 2PC (64-bit ring, 18 bits)."""

    function: Callable[..., Any]
    shape: tuple[int, ...] = (2, 3, 8)
    low: float = -3.0
    high: float = 3.0
    tolerance: float = 1e-4
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def build(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64) -> TokenRows:
        """Make the model, with random values."""
        shape = self.shape if shape is None else shape
        values = torch.empty(shape, dtype=dtype).uniform_(self.low, self.high)
        parameters = {name: torch.empty(size, dtype=dtype).uniform_(0.5, 2.0) for name, size in self.parameters.items()}
        return TokenRows(values, self.function, parameters)


def _causal(x: Any, fill: float) -> torch.Tensor:
    length = 4
    return torch.triu(torch.full((length, length), fill, dtype=torch.float64), 1)


def _deviation_norm(x: Any, *arguments: Any) -> Any:
    """The op, as one node where a graph is traced."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", deviation_norm, (x, *arguments), {})
    return deviation_norm(x, *arguments)


_SQUARE = (1, 2, 4, 4)

ELEMENTWISE = {
    "add": Case(lambda x, m: aten.add.Tensor(x, aten.mul.Scalar(x, 2.0), alpha=0.5)),
    "add_weight": Case(lambda x, m: aten.add.Tensor(x, m.b), parameters={"b": (8,)}),
    "add_scalar": Case(lambda x, m: aten.add.Scalar(x, 1.5)),
    "sub": Case(lambda x, m: aten.sub.Tensor(x, aten.mul.Tensor(x, x))),
    "rsub": Case(lambda x, m: aten.rsub.Scalar(x, 1.0)),
    "mul": Case(lambda x, m: aten.mul.Tensor(x, x)),
    "mul_weight": Case(lambda x, m: aten.mul.Tensor(x, m.w), parameters={"w": (8,)}),
    "div_scalar": Case(lambda x, m: aten.div.Scalar(x, 3.0)),
    "div_weight": Case(lambda x, m: aten.div.Tensor(x, m.w), parameters={"w": (1,)}, tolerance=2e-3),
    "div": Case(lambda x, m: aten.div.Tensor(x, aten.add.Scalar(aten.mul.Tensor(x, x), 1.0)), tolerance=1e-3),
    "reciprocal": Case(lambda x, m: aten.reciprocal.default(x), low=0.5, high=8.0, tolerance=1e-3),
    "neg": Case(lambda x, m: aten.neg.default(x)),
    "abs": Case(lambda x, m: aten.abs.default(x)),
    "square": Case(lambda x, m: aten.square.default(x)),
    "pow2": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 2)),
    "pow3": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 3.0), tolerance=3e-4),
    "pow_half": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 0.5), low=0.1, tolerance=1e-3),
    "pow_minus_half": Case(lambda x, m: aten.pow.Tensor_Scalar(x, -0.5), low=0.1, tolerance=3e-3),
    "pow_minus_one": Case(lambda x, m: aten.pow.Tensor_Scalar(x, -1), low=0.5, tolerance=1e-3),
    "sqrt": Case(lambda x, m: aten.sqrt.default(x), low=0.1, high=50.0, tolerance=1e-3),
    "rsqrt": Case(lambda x, m: aten.rsqrt.default(x), low=0.1, high=50.0, tolerance=3e-3),
    "exp": Case(lambda x, m: aten.exp.default(x), low=-8.0, high=0.0, tolerance=2e-3),
    "log": Case(lambda x, m: aten.log.default(x), low=0.1, high=50.0, tolerance=1e-3),
    "relu": Case(lambda x, m: aten.relu.default(x)),
    "leaky_relu": Case(lambda x, m: aten.leaky_relu.default(x, 0.1)),
    "hardswish": Case(lambda x, m: aten.hardswish.default(x)),
    "hardsigmoid": Case(lambda x, m: aten.hardsigmoid.default(x), low=-5.0, high=5.0),
    "hardshrink": Case(lambda x, m: aten.hardshrink.default(x, 0.75)),
    "softshrink": Case(lambda x, m: aten.softshrink.default(x, 0.75)),
    "prelu": Case(lambda x, m: aten.prelu.default(x, m.w), parameters={"w": (1,)}),
    "maximum": Case(lambda x, m: aten.maximum.default(x, aten.neg.default(x))),
    "minimum": Case(lambda x, m: aten.minimum.default(x, aten.neg.default(x))),
    "clamp": Case(lambda x, m: aten.clamp.default(x, -1.0, 2.0)),
    "clamp_min": Case(lambda x, m: aten.clamp_min.default(x, 0.5)),
    "where": Case(lambda x, m: aten.where.self(aten.gt.Scalar(x, 0.0), x, aten.mul.Scalar(x, 2.0))),
    "masked_fill": Case(lambda x, m: aten.masked_fill.Scalar(x, torch.arange(8)[None] < 3, 0.25)),
}

APPROXIMATED = {
    "gelu": Case(lambda x, m: aten.gelu.default(x), low=-9.0, high=9.0, tolerance=3e-4),
    "gelu_tanh": Case(lambda x, m: aten.gelu.default(x, approximate="tanh"), low=-9.0, high=9.0, tolerance=2e-4),
    "silu": Case(lambda x, m: aten.silu.default(x), low=-20.0, high=20.0, tolerance=6e-4),
    "sigmoid": Case(lambda x, m: aten.sigmoid.default(x), low=-20.0, high=20.0, tolerance=4e-4),
    "tanh": Case(lambda x, m: aten.tanh.default(x), low=-9.0, high=9.0, tolerance=5e-4),
    "softplus": Case(lambda x, m: aten.softplus.default(x), low=-20.0, high=20.0, tolerance=6e-4),
    "log_sigmoid": Case(lambda x, m: aten.log_sigmoid.default(x), low=-20.0, high=20.0, tolerance=6e-4),
    "mish": Case(lambda x, m: aten.mish.default(x), low=-20.0, high=20.0, tolerance=7e-4),
    "elu": Case(lambda x, m: aten.elu.default(x), low=-20.0, high=20.0, tolerance=6e-4),
    "selu": Case(lambda x, m: aten.selu.default(x), low=-20.0, high=20.0, tolerance=1.1e-3),
    "celu": Case(lambda x, m: aten.celu.default(x, 1.5), low=-20.0, high=20.0, tolerance=9e-4),
    "expm1": Case(lambda x, m: aten.expm1.default(x), low=-8.0, high=0.0, tolerance=2e-3),
    "exp2": Case(lambda x, m: aten.exp2.default(x), low=-8.0, high=0.0, tolerance=2e-3),
    "log1p": Case(lambda x, m: aten.log1p.default(x), low=-0.9, high=50.0, tolerance=1e-3),
}

CONTRACTIONS = {
    "linear": Case(lambda x, m: aten.linear.default(x, m.w, m.b), parameters={"w": (5, 8), "b": (5,)}, tolerance=5e-4),
    "linear_no_bias": Case(lambda x, m: aten.linear.default(x, m.w), parameters={"w": (5, 8)}, tolerance=5e-4),
    "matmul": Case(lambda x, m: aten.matmul.default(x, aten.transpose.int(x, -1, -2)), tolerance=5e-4),
    "matmul_weight": Case(lambda x, m: aten.matmul.default(x, m.w), parameters={"w": (8, 3)}, tolerance=5e-4),
    "matmul_rows": Case(lambda x, m: aten.matmul.default(x, m.w), (4, 8), parameters={"w": (8, 3)}, tolerance=5e-4),
    "layer_norm": Case(
        lambda x, m: aten.layer_norm.default(x, [8], m.w, m.b), parameters={"w": (8,), "b": (8,)}, tolerance=5e-3
    ),
    "layer_norm_bare": Case(lambda x, m: aten.layer_norm.default(x, [8]), tolerance=5e-3),
    "rms_norm": Case(lambda x, m: aten.rms_norm.default(x, [8], m.w, 1e-6), parameters={"w": (8,)}, tolerance=5e-3),
    "deviation_norm": Case(
        lambda x, m: _deviation_norm(x, [8], m.w, m.b, 1e-5, True, "added"),
        parameters={"w": (8,), "b": (8,)},
        tolerance=5e-3,
    ),
    "deviation_norm_large_eps": Case(
        lambda x, m: _deviation_norm(x, [8], None, None, 0.7, False, "added"), tolerance=5e-3
    ),
    "deviation_norm_at_least": Case(
        lambda x, m: _deviation_norm(x, [8], m.w, None, 1.7, False, "at_least"), parameters={"w": (8,)}, tolerance=5e-3
    ),
    "sum": Case(lambda x, m: aten.sum.dim_IntList(x, [-1], True)),
    "sum_all": Case(lambda x, m: aten.sum.default(x), tolerance=5e-4),
    "mean": Case(lambda x, m: aten.mean.dim(x, [-1])),
    "amax": Case(lambda x, m: aten.amax.default(x, [-1], True)),
    "amin": Case(lambda x, m: aten.amin.default(x, [1])),
    "softmax": Case(lambda x, m: aten.softmax.int(x, -1), tolerance=1e-3),
    "softmax_first_dim": Case(lambda x, m: aten.softmax.int(x, 1), tolerance=1e-3),
    "softmax_added_mask": Case(
        lambda x, m: aten.softmax.int(aten.add.Tensor(x, _causal(x, float("-inf"))), -1), _SQUARE, tolerance=1e-3
    ),
    "softmax_huge_mask": Case(
        lambda x, m: aten.softmax.int(aten.add.Tensor(x, _causal(x, -3.4e38)), -1), _SQUARE, tolerance=1e-3
    ),
    "softmax_masked_fill": Case(
        lambda x, m: aten.softmax.int(aten.masked_fill.Scalar(aten.mul.Scalar(x, 0.5), _causal(x, 1.0) > 0, -1e9), -1),
        _SQUARE,
        tolerance=1e-3,
    ),
    "softmax_where": Case(
        lambda x, m: aten.softmax.int(
            aten.where.self(_causal(x, 1.0) == 0, x, torch.tensor(float("-inf"), dtype=torch.float64)), -1
        ),
        _SQUARE,
        tolerance=1e-3,
    ),
    "softmax_multiplied_mask": Case(  # the form of the first GPT: w * b - 1e4 * (1 - b)
        lambda x, m: aten.softmax.int(aten.add.Tensor(aten.mul.Tensor(x, 1 - _causal(x, 1.0)), _causal(x, -1e4)), -1),
        _SQUARE,
        tolerance=1e-3,
    ),
    "softmax_alibi": Case(
        lambda x, m: aten.softmax.int(
            aten.add.Tensor(aten.add.Tensor(x, torch.arange(4.0, dtype=torch.float64) * 0.25), _causal(x, -1e5)),
            -1,
        ),
        _SQUARE,
        tolerance=1e-3,
    ),
    "softmax_server_bias": Case(
        lambda x, m: aten.softmax.int(aten.add.Tensor(aten.add.Tensor(x, m.b), _causal(x, float("-inf"))), -1),
        _SQUARE,
        parameters={"b": (4,)},
        tolerance=1e-3,
    ),
}

MOVES = {
    "reshape": Case(lambda x, m: aten.reshape.default(x, [3, -1])),
    "flatten": Case(lambda x, m: aten.flatten.using_ints(x, 1)),
    "unflatten": Case(lambda x, m: aten.unflatten.int(x, -1, [2, 4])),
    "transpose": Case(lambda x, m: aten.transpose.int(x, 0, -1)),
    "permute": Case(lambda x, m: aten.permute.default(x, [2, 0, 1])),
    "unsqueeze": Case(lambda x, m: aten.unsqueeze.default(x, -2)),
    "squeeze": Case(lambda x, m: aten.squeeze.dim(aten.unsqueeze.default(x, 1), 1)),
    "squeeze_all": Case(lambda x, m: aten.squeeze.default(aten.unsqueeze.default(x, 1))),
    "expand": Case(lambda x, m: aten.expand.default(x, [4, -1, -1, -1])),
    "expand_as": Case(lambda x, m: aten.expand_as.default(aten.select.int(x, 0, 0), x)),
    "repeat": Case(lambda x, m: aten.repeat.default(x, [2, 1, 3])),
    "repeat_interleave": Case(lambda x, m: aten.repeat_interleave.self_int(x, 3, -2)),
    "repeat_interleave_flat": Case(lambda x, m: aten.repeat_interleave.self_int(x, 2)),
    "slice": Case(lambda x, m: aten.slice.Tensor(x, -1, 1, 7, 2)),
    "slice_to_end": Case(lambda x, m: aten.slice.Tensor(x, 1, -2, 9223372036854775807)),
    "select": Case(lambda x, m: aten.select.int(x, 1, -1)),
    "index": Case(lambda x, m: aten.index.Tensor(x, [None, torch.tensor([2, 1])])),
    "cat": Case(lambda x, m: aten.cat.default([x, aten.neg.default(x)], 1)),
    "constant_pad_nd": Case(lambda x, m: aten.constant_pad_nd.default(x, [1, 2])),
    "flip": Case(lambda x, m: aten.flip.default(x, [-1])),
    "roll": Case(lambda x, m: aten.roll.default(x, [2], [-1])),
    "index_select": Case(lambda x, m: aten.index_select.default(x, 1, torch.tensor([2, 1]))),
    "stack": Case(lambda x, m: aten.stack.default([x, x], -1)),
    "split": Case(lambda x, m: aten.split.Tensor(x, 3, -1)[2]),
    "split_sizes": Case(lambda x, m: aten.split_with_sizes.default(x, [2, 6], -1)[1]),
    "chunk": Case(lambda x, m: aten.chunk.default(x, 3, -1)[1]),
    "unbind": Case(lambda x, m: aten.unbind.int(x, 1)[2]),
    "alias": Case(lambda x, m: aten.alias.default(x)),
    "type_as": Case(lambda x, m: aten.type_as.default(x, aten.neg.default(x))),
}

ALL = {**ELEMENTWISE, **APPROXIMATED, **CONTRACTIONS, **MOVES}

_LOW, _HIGH = torch.linspace(-2, 0, 8, dtype=torch.float64), torch.linspace(0.5, 1, 8, dtype=torch.float64)

SIGNATURES = {
    # the rest of each operator's ATen signature, defaults included
    "hardtanh by default": Case(lambda x, m: aten.hardtanh.default(x)),
    "hardtanh": Case(lambda x, m: aten.hardtanh.default(x, 0, 2)),
    "hardtanh keyword": Case(lambda x, m: aten.hardtanh.default(x, max_val=0.5)),
    "clamp tensors": Case(lambda x, m: aten.clamp.Tensor(x, _LOW, _HIGH)),
    "clamp crossed": Case(lambda x, m: aten.clamp.default(x, 1.0, -1.0)),
    "clamp max alone": Case(lambda x, m: aten.clamp.default(x, max=0.0)),
    "clamp zero": Case(lambda x, m: aten.clamp.default(x, 0, 0)),
    "clamp weight": Case(lambda x, m: aten.clamp.Tensor(x, None, m.w), parameters={"w": (8,)}),
    "clamp_min tensor": Case(lambda x, m: aten.clamp_min.Tensor(x, _LOW)),
    "clamp_max": Case(lambda x, m: aten.clamp_max.default(x, 0)),
    "softplus sharp": Case(lambda x, m: aten.softplus.default(x, 2.5), tolerance=5e-4),
    "softplus flat": Case(lambda x, m: aten.softplus.default(x, 0.25, 30), tolerance=2.5e-3),
    "softplus with a step": Case(lambda x, m: aten.softplus.default(x, 2, 1), tolerance=5e-4),
    "softplus with a step below": Case(lambda x, m: aten.softplus.default(x, 1, -1), tolerance=6e-4),
    "elu alpha": Case(lambda x, m: aten.elu.default(x, 2.5), tolerance=1.5e-3),
    "elu upside down": Case(lambda x, m: aten.elu.default(x, -1.5), tolerance=9e-4),
    "elu scales": Case(lambda x, m: aten.elu.default(x, 1.5, 0.5, 3), tolerance=6e-4),
    "celu by default": Case(lambda x, m: aten.celu.default(x), tolerance=6e-4),
    "leaky_relu by default": Case(lambda x, m: aten.leaky_relu.default(x)),
    "leaky_relu reversed": Case(lambda x, m: aten.leaky_relu.default(x, -0.5)),
    "prelu by channel": Case(lambda x, m: aten.prelu.default(x, m.w), parameters={"w": (3,)}),
    "add alpha": Case(lambda x, m: aten.add.Tensor(x, m.w, alpha=-2), parameters={"w": (8,)}),
    "add scalar alpha": Case(lambda x, m: aten.add.Scalar(x, 3, 0.5)),
    "sub alpha": Case(lambda x, m: aten.sub.Tensor(x, m.w, alpha=3), parameters={"w": (3, 1)}),
    "sub scalar alpha": Case(lambda x, m: aten.sub.Scalar(x, 2, 4)),
    "rsub alpha": Case(lambda x, m: aten.rsub.Scalar(x, 2, 4)),
    "rsub tensor alpha": Case(lambda x, m: aten.rsub.Tensor(x, m.w, alpha=0.5), parameters={"w": (8,)}),
    "mul scalar": Case(lambda x, m: aten.mul.Scalar(x, 3)),
    "div int": Case(lambda x, m: aten.div.Tensor(x, 7)),
    "div mode none": Case(lambda x, m: aten.div.Tensor_mode(x, 2.0, rounding_mode=None)),
    "div public": Case(lambda x, m: aten.div.Tensor(x, _HIGH)),
    "public over live": Case(lambda x, m: aten.div.Tensor(_HIGH, x), low=0.5),
    "pow 1": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 1)),
    "pow 5": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 5)),
    "pow 6": Case(lambda x, m: aten.pow.Tensor_Scalar(x, 6.0)),
    "pow -2": Case(lambda x, m: aten.pow.Tensor_Scalar(x, -2), low=0.5),
    "where scalar": Case(lambda x, m: aten.where.ScalarOther(aten.gt.Scalar(x, 0.5), x, 2.0)),
    "where scalar first": Case(lambda x, m: aten.where.ScalarSelf(aten.le.Scalar(x, 0.5), 2.0, x)),
    "where live": Case(lambda x, m: aten.where.self(aten.lt.Tensor(x, _LOW), x, aten.neg.default(x))),
    "ge": Case(lambda x, m: aten.where.self(aten.ge.Scalar(x, 0), x, aten.square.default(x))),
    "masked_fill tensor": Case(
        lambda x, m: aten.masked_fill.Tensor(x, torch.arange(8) > 3, torch.tensor(2.5, dtype=torch.float64))
    ),
    "sum all": Case(lambda x, m: aten.sum.dim_IntList(x, None)),
    "sum empty dims": Case(lambda x, m: aten.sum.dim_IntList(x, [], True)),
    "sum dims": Case(lambda x, m: aten.sum.dim_IntList(x, [0, -1])),
    "sum dtype": Case(lambda x, m: aten.sum.dim_IntList(x, [1], dtype=torch.float64)),
    "mean all": Case(lambda x, m: aten.mean.default(x)),
    "mean none": Case(lambda x, m: aten.mean.dim(x, None, True)),
    "mean empty dims": Case(lambda x, m: aten.mean.dim(x, [])),
    "mean dims": Case(lambda x, m: aten.mean.dim(x, [0, 2], True)),
    "amax all": Case(lambda x, m: aten.amax.default(x)),
    "amin dims": Case(lambda x, m: aten.amin.default(x, [0, 2], True)),
    "layer_norm eps": Case(lambda x, m: aten.layer_norm.default(x, [3, 8], None, None, 0.5)),
    "rms_norm by default": Case(lambda x, m: aten.rms_norm.default(x, [8])),
    "flatten all": Case(lambda x, m: aten.flatten.using_ints(x)),
    "flatten some": Case(lambda x, m: aten.flatten.using_ints(x, -2, -1)),
    "squeeze dims": Case(lambda x, m: aten.squeeze.dims(aten.unsqueeze.default(x, 0), [0, 1])),
    "expand more": Case(lambda x, m: aten.expand.default(aten.unsqueeze.default(x, 0), [5, 2, -1, 8])),
    "slice by default": Case(lambda x, m: aten.slice.Tensor(x)),
    "slice backwards": Case(lambda x, m: aten.slice.Tensor(x, -1, -5, -1)),
    "slice too far": Case(lambda x, m: aten.slice.Tensor(x, 2, 2, 100)),
    "index two": Case(lambda x, m: aten.index.Tensor(x, [torch.tensor([1, 0]), None, torch.tensor([7, 6])])),
    "index bool": Case(lambda x, m: aten.index.Tensor(x, [None, torch.tensor([True, False, True])])),
    "split uneven": Case(lambda x, m: aten.split.Tensor(x, 2, 1)[1]),
    "split by default": Case(lambda x, m: aten.split.Tensor(x, 1)[1]),
    "chunk uneven": Case(lambda x, m: aten.chunk.default(x, 5, -1)[3]),
    "unbind by default": Case(lambda x, m: aten.unbind.int(x)[1]),
    "cat by default": Case(lambda x, m: aten.cat.default([x, x])),
    "stack by default": Case(lambda x, m: aten.stack.default([x, x])),
    "constant_pad_nd cut": Case(lambda x, m: aten.constant_pad_nd.default(x, [-2, 1, 1, -2], 0.75)),
    "constant_pad_nd none": Case(lambda x, m: aten.constant_pad_nd.default(x, [0, 0, -1, 2, 0, 1], -1.5)),
    "flip dims": Case(lambda x, m: aten.flip.default(x, [0, 2])),
    "roll dims": Case(lambda x, m: aten.roll.default(x, [-1, 9], [1, -1])),
    "roll flat": Case(lambda x, m: aten.roll.default(x, [5])),
    "index_select by default": Case(lambda x, m: aten.index_select.default(x, 0, torch.tensor([1]))),
    "permute negative": Case(lambda x, m: aten.permute.default(x, [-1, 0, -2])),
    "t": Case(lambda x, m: aten.t.default(x), (4, 8)),
}
