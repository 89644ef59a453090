"""Every live operator over its whole ATen signature, defaults included, against PyTorch: plain JAX in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aero_compile.errors import LoweringError
from aero_compile.runtime.lowering.to_jax import supported_ops
from tests.support import operator_cases as cases
from tests.support.operator_cases import Case
from tests.support.runtime_graphs import aten, expected, in_jax

pytest.importorskip("jax")

_LOW, _HIGH = torch.linspace(-2, 0, 8, dtype=torch.float64), torch.linspace(0.5, 1, 8, dtype=torch.float64)

SIGNATURES = {
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
    "addmm beta 0": Case(
        lambda x, m: aten.addmm.default(m.b, x, m.w, beta=0, alpha=2), (4, 8), parameters={"w": (8, 3), "b": (3,)}
    ),
    "addmm beta": Case(
        lambda x, m: aten.addmm.default(m.b, x, m.w, beta=3), (4, 8), parameters={"w": (8, 3), "b": (3,)}
    ),
    "layer_norm eps": Case(lambda x, m: aten.layer_norm.default(x, [3, 8], None, None, 0.5)),
    "rms_norm by default": Case(lambda x, m: aten.rms_norm.default(x, [8])),
    "flatten all": Case(lambda x, m: aten.flatten.using_ints(x)),
    "flatten some": Case(lambda x, m: aten.flatten.using_ints(x, -2, -1)),
    "squeeze dims": Case(lambda x, m: aten.squeeze.dims(aten.unsqueeze.default(x, 0), [0, 1])),
    "expand more": Case(lambda x, m: aten.expand.default(aten.unsqueeze.default(x, 0), [5, 2, -1, 8])),
    "slice by default": Case(lambda x, m: aten.slice.Tensor(x)),
    "slice backwards": Case(lambda x, m: aten.slice.Tensor(x, -1, -5, -1)),
    "slice too far": Case(lambda x, m: aten.slice.Tensor(x, 2, 2, 100)),
    "narrow negative": Case(lambda x, m: aten.narrow.default(x, -1, -4, 2)),
    "index two": Case(lambda x, m: aten.index.Tensor(x, [torch.tensor([1, 0]), None, torch.tensor([7, 6])])),
    "index bool": Case(lambda x, m: aten.index.Tensor(x, [None, torch.tensor([True, False, True])])),
    "split uneven": Case(lambda x, m: aten.split.Tensor(x, 2, 1)[1]),
    "split by default": Case(lambda x, m: aten.split.Tensor(x, 1)[1]),
    "chunk uneven": Case(lambda x, m: aten.chunk.default(x, 5, -1)[3]),
    "unbind by default": Case(lambda x, m: aten.unbind.int(x)[1]),
    "cat by default": Case(lambda x, m: aten.cat.default([x, x])),
    "stack by default": Case(lambda x, m: aten.stack.default([x, x])),
    "movedim many": Case(lambda x, m: aten.movedim.intlist(x, [0, 1], [2, 0])),
    "permute negative": Case(lambda x, m: aten.permute.default(x, [-1, 0, -2])),
    "t": Case(lambda x, m: aten.t.default(x), (4, 8)),
    "softmax keyword": Case(lambda x, m: aten.softmax.int(x, dim=0)),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_equals_pytorch(name: str) -> None:
    model = SIGNATURES[name].build()
    np.testing.assert_allclose(in_jax(model), expected(model), rtol=0, atol=1e-9)


REFUSED = {
    "div floor": lambda x, m: aten.div.Tensor_mode(x, 2.0, rounding_mode="floor"),
    "pow of a number": lambda x, m: aten.pow.Scalar(2.0, x),
    "pow by a tensor": lambda x, m: aten.pow.Tensor_Tensor(x, torch.tensor(2.0, dtype=torch.float64)),
    "pow 0": lambda x, m: aten.pow.Tensor_Scalar(x, 0),
    "sum to integers": lambda x, m: aten.sum.default(x, dtype=torch.int64),
    "repeats of a tensor": lambda x, m: aten.repeat_interleave.self_Tensor(x, torch.tensor([1, 2]), 0),
    "view of bits": lambda x, m: aten.view.dtype(x, torch.int64),
    "norm and its statistics": lambda x, m: aten.native_layer_norm.default(x, [8], None, None, 1e-5)[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused(name: str) -> None:
    with pytest.raises(LoweringError, match="privately"):
        in_jax(Case(REFUSED[name]).build())


def test_every_operator_is_compared() -> None:
    """By the operators that the graphs of all cases call."""
    called = {"aten.embedding"}
    for case in (*cases.ALL.values(), *SIGNATURES.values()):
        for node in case.build().logits_graph().nodes:
            called.add(str(getattr(node.target, "overloadpacket", None)))
    assert called >= {name for name in supported_ops() if name.startswith("aten.")} - _PLAIN_COPIES


_PLAIN_COPIES = {
    f"aten.{name}"
    for name in ("_unsafe_view", "detach", "lift_fresh_copy", "to", "_to_copy", "feature_dropout", "native_dropout")
}
