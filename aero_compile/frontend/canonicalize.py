"""Canonicalization: the many spellings that exported decoders use → one small set of ATen ops.

Before → after:
    values written into tensors                                   → masked_fill (aero_compile.frontend.writes)
    assertions, clones, full slices, float casts of live values   → gone
    fill values of masks (−inf, the smallest float of a dtype)    → −65504
    view / _unsafe_view / unflatten-by-view                       → reshape
    native_dropout, dropout with its flag baked in                → nn.Dropout modules
    scaled_dot_product_attention                                  → matmul, mul, where/add, softmax, dropout, matmul
    addmm, mm, matmul with a weight, + bias; conv1d of one token  → linear
    clamp(min=0); glu([a, b])                                     → relu; a·sigmoid(b)
    relu6; max(x, y); max(x, dim) without its indices             → hardtanh(0, 6); maximum; amax
    other products: mm, bmm, addmm, baddbmm                       → matmul (+ add)
    numpy_T                                                       → permute
    linear(x, W) + s·linear(linear(x, A), B)                      → linear(x, W + s·BA) (see capturing.adapters)
    arithmetic and choices that compute gelu, relu, …, LayerNorm, RMSNorm, softmax → the op itself
                                                                    (aero_compile.frontend.recognize)

Every rewrite preserves the function (to rounding). Casts between floating-point types are dropped from live values,
and masks and tables of another type are cast: the canonical graph computes in the dtype of its weights, whatever that
is, and half-precision kernels of softmax and the norms accumulate in float32 on their own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from aero_compile.frontend.adapters import join_adapters
from aero_compile.frontend.convolutions import open_convolutions
from aero_compile.frontend.dropouts import insert_dropout, make_dropouts
from aero_compile.frontend.recognize import recognize
from aero_compile.frontend.writes import open_writes
from aero_compile.ir.constants import cast_constants, from_parameters, mark_constants
from aero_compile.ir.dataflow import live_values, tainted_nodes
from aero_compile.ir.mask_values import MASKED, MASKED_HALF, bound_fill_values, masked
from aero_compile.ir.rewriting import bypass, insert_call, replace_node
from aero_compile.ir.shapes import is_floating, node_values, sample_shape
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
_COPIES = (
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
)
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device)
_SOFTMAXES = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_BINARY: Mapping[Any, Any] = {aten.max.other: aten.maximum.default, aten.min.other: aten.minimum.default}
_EXTREMES: Mapping[Any, Any] = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}


def canonicalize(model: TransformedModel) -> TransformedModel:
    """Rewrite the graph of a freshly captured `model` in place into canonical ops."""
    graph = model.graph
    if open_writes(model, _sample_values(model)):
        model.graph_changed()
    for node in graph.nodes:
        bound_fill_values(node, _dtype(model))
    values = _sample_values(model)
    live = {n for n in tainted_nodes(graph, model.convention.tokens) if is_floating(values.get(n))}
    flexible = live | from_parameters(model)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _simplify(node, live, flexible, values)
    cast_constants(model, live, values, _dtype(model))
    make_dropouts(model)
    _attention(model)
    open_convolutions(model)
    _linear(model)
    join_adapters(model)
    model.graph_changed()
    recognize(model)
    _biases(model)
    model.graph_changed()
    mark_constants(model)
    return model


def _sample_values(model: TransformedModel) -> dict[fx.Node, Any]:
    return node_values(model, *sample_shape(model))


def _dtype(model: TransformedModel) -> torch.dtype:
    return next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)


def _simplify(node: fx.Node, live: set[fx.Node], flexible: set[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Rewrites of a single node that need no context."""
    target = node.target
    if str(target).startswith("aten._assert") or target is aten._assert_tensor_metadata.default:
        node.graph.erase_node(node)
    elif target in _RESHAPES:
        node.target = aten.reshape.default
    elif _is_identity(node, flexible, values):
        bypass(node, node.all_input_nodes[0])
    elif target is aten.sub.Tensor and node.args[0] in live and isinstance(node.args[1], fx.Node):
        if node.args[1] not in live and not node.kwargs:  # x − mask → x + (−mask): masks are added everywhere
            negative = insert_call(node.graph, node, aten.neg.default, node.args[1])
            values[negative] = values[node.args[1]]
            node.target, node.args = aten.add.Tensor, (node.args[0], negative)
    elif target in _SOFTMAXES and node in live:
        dim = cast("int", node.args[1])
        last = dim - values[node].dim() if dim >= 0 else dim
        node.target, node.args, node.kwargs = aten.softmax.int, (node.args[0], last), {}
    elif target in (aten.clamp.default, aten.clamp_min.default) and node in live and _bounds(node) == (0, None):
        node.target, node.args, node.kwargs = aten.relu.default, (node.args[0],), {}
    elif target in _BINARY and node in live:
        node.target = _BINARY[target]
    elif target is aten.numpy_T.default:
        node.target, node.args = aten.permute.default, (node.args[0], list(range(values[node].dim()))[::-1])
    elif target is aten.relu6.default and node in live:
        node.target, node.args = aten.hardtanh.default, (node.args[0], 0.0, 6.0)
    elif target in _EXTREMES and node in live and {user.args[1] for user in node.users} == {0}:
        new = _without_indices(node)
        live.add(new)
        flexible.add(new)
        values[new] = values[node][0]
    elif target in _CASTS and node in live and node.args[0] not in live:
        _follow_dtype(node, live)
    elif target is aten.glu.default and node in live:
        new = _opened_glu(node, values)
        live.update((new, *new.all_input_nodes))
        flexible.update((new, *new.all_input_nodes))
    elif target is aten.copy.default:
        _open_copy(node, values)
    elif target is aten.slice_scatter.default:
        _join(node, values)
    elif node in flexible and is_floating(values.get(node)) and node.kwargs.get("dtype") is not None:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}  # Σx, in float32
    elif target is aten.layer_norm.default:
        node.args = (*_padded(node.args, 5, (None, None, 1e-5))[:5],)


def _without_indices(node: fx.Node) -> fx.Node:
    """max(x, dim) of which only the values are read → amax(x, [dim])."""
    source, dim, *keep = node.args
    new = insert_call(node.graph, node, _EXTREMES[node.target], source, [dim], *keep)
    for user in list(node.users):
        bypass(user, new)
    node.graph.erase_node(node)
    return new


def _follow_dtype(node: fx.Node, live: set[fx.Node]) -> None:
    """A cast of what was compared, or rounded, to the dtype of hidden values → type_as one of them.

    The dtype that was written would stay behind when the model gets another.
    """
    compared = cast("fx.Node", node.args[0])
    while compared.all_input_nodes and compared not in live:
        compared = next((n for n in compared.all_input_nodes if n in live), compared.all_input_nodes[0])
    if compared in live:
        node.target, node.args, node.kwargs = aten.type_as.default, (node.args[0], compared), {}


def _opened_glu(node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    """glu([a, b]) → a·sigmoid(b)."""
    source, dim = node.args[0], node.args[1] if len(node.args) > 1 else -1
    assert isinstance(dim, int)
    half = values[node].shape[dim]
    split = insert_call(node.graph, node, aten.split.Tensor, source, half, dim)
    a, b = (insert_call(node.graph, node, operator.getitem, split, i) for i in range(2))
    gate = insert_call(node.graph, node, aten.sigmoid.default, b)
    new = insert_call(node.graph, node, aten.mul.Tensor, a, gate)
    for each in (a, gate, new):
        values[each] = values[node]
    replace_node(node, new)
    return new


def _bounds(node: fx.Node) -> tuple[Any, Any]:
    """Lower and upper bound of a clamp."""
    given = dict(zip(("min", "max"), node.args[1:], strict=False)) | dict(node.kwargs)
    return given.get("min"), given.get("max")


def _open_copy(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    """copy(into, x) → x in the shape of `into`."""
    into, source = node.args[:2]
    assert isinstance(into, fx.Node)
    if not isinstance(source, fx.Node) or values[source].dtype != values[into].dtype:
        return
    if values[source].shape != values[into].shape:
        expanded = insert_call(node.graph, node, aten.expand_as.default, source, into)
        values[expanded] = values[into]
        source = expanded
    bypass(node, source)
    if not into.users and into.op == "call_function":  # was there for its shape; a user less for what it is a part of
        into.graph.erase_node(into)


def _join(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    """A tensor that is filled part by part, y[..., :n] = a and y[..., n:] = b → cat([a, b])."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.slice_scatter.default or len(inner.users) > 1:
        return
    rank = values[node].dim()
    outer, first = (_padded(each.args, 6, (0, None, None, 1)) for each in (node, inner))
    sizes = [values[each[1]].shape[each[2] % rank] for each in (first, outer)]
    adjoin = first[3] in (0, None) and first[4] == outer[3] == sizes[0] and (first[5], outer[5]) == (1, 1)
    if outer[2] % rank == first[2] % rank and adjoin and sum(sizes) == values[node].shape[outer[2] % rank]:
        joined = insert_call(node.graph, node, aten.cat.default, [first[1], outer[1]], outer[2] % rank - rank)
        values[joined] = values[node]
        replace_node(node, joined)


def _is_identity(node: fx.Node, flexible: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Copies, whole slices, lower bounds of masks, and casts of live values and weights (see the module's text)."""
    first = node.args[0] if node.args else None
    if node.target in _COPIES:
        return bool(node.all_input_nodes)
    if node.target is aten.slice.Tensor:
        return _takes_all(node)
    if node.target in (aten.max.other, aten.maximum.default):
        bound = node.args[1]
        return (
            isinstance(bound, fx.Node) and bound.target is aten.full.default and bound.args[1] in (MASKED, MASKED_HALF)
        )
    between_floats = is_floating(values.get(node)) and is_floating(values.get(cast("fx.Node", first)))
    return node.target in _CASTS and node in flexible and first in flexible and between_floats


def _padded(args: tuple[Any, ...], length: int, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    return args + defaults[len(defaults) - (length - len(args)) :] if len(args) < length else args


def _takes_all(node: fx.Node) -> bool:
    start, end, step = _padded(node.args, 5, (0, None, None, 1))[2:5]
    whole = end is None or (isinstance(end, int) and end >= 2**62)
    return start in (0, None) and whole and step == 1


def _attention(model: TransformedModel) -> None:
    """Open scaled_dot_product_attention into its scores, mask, softmax, dropout and product."""
    values = _sample_values(model)
    for node in list(model.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            _open_attention(model, node, values)
        elif node.target is aten.baddbmm.default or (node.target is aten.addmm.default and node.kwargs):
            replace_node(node, _open_product(model.graph, node))
        elif node.target in (aten.bmm.default, aten.mm.default):
            node.target = aten.matmul.default


def _open_attention(model: TransformedModel, node: fx.Node, values: dict[fx.Node, Any]) -> None:
    graph = model.graph
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = given["query"], given["key"], given["value"]

    def call(target: Any, *args: Any) -> fx.Node:
        return insert_call(graph, node, target, *args)

    if given.get("enable_gqa"):
        groups = values[query].shape[-3] // values[key].shape[-3]
        key, value = (call(aten.repeat_interleave.self_int, x, groups, -3) for x in (key, value))
    scale = given.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(values[query].shape[-1])
    scores = call(aten.matmul.default, query, call(aten.transpose.int, key, -2, -1))
    scores = call(aten.mul.Tensor, scores, scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        rows, columns = (call(aten.sym_size.int, x, values[query].dim() - 2) for x in (query, key))
        device = values[query].device
        with graph.inserting_before(node):
            ones = graph.call_function(aten.ones.default, ([rows, columns],), {"dtype": torch.bool, "device": device})
        mask = call(aten.tril.default, ones)
        values[mask] = torch.empty(0, dtype=torch.bool)
    if mask is not None:
        if values[mask].dtype == torch.bool:
            scores = call(aten.where.ScalarOther, mask, scores, masked(_dtype(model)))
        else:
            scores = call(aten.add.Tensor, scores, mask)
    probabilities = call(aten.softmax.int, scores, -1)
    dropped = probabilities
    if float(given.get("dropout_p") or 0.0) > 0.0:
        dropped = call(aten.alias.default, probabilities)
    output = call(aten.matmul.default, dropped, value)
    if dropped is not probabilities:
        insert_dropout(model, dropped, probabilities, float(given["dropout_p"]))
    replace_node(node, output)


def _open_product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """baddbmm(c, a, b, beta, alpha), or addmm → matmul(a, b)·alpha + c·beta."""
    bias, left, right = node.args[:3]
    result = insert_call(graph, node, aten.matmul.default, left, right)
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if alpha != 1:
        result = insert_call(graph, node, aten.mul.Tensor, result, alpha)
    if beta != 0:
        term = bias if beta == 1 else insert_call(graph, node, aten.mul.Tensor, bias, beta)
        result = insert_call(graph, node, aten.add.Tensor, result, term)
    return result


def _linear(model: TransformedModel) -> None:
    """Products of a live value with a 2-D weight → linear(x, weight.t(), bias)."""
    live, values = live_values(model)
    for node in list(model.graph.nodes):
        if node.target not in (aten.addmm.default, aten.matmul.default):
            continue
        *bias, left, right = node.args
        if not _has_weight(left, right, live, values):
            if bias and node in live:
                opened = _open_product(model.graph, node)
                live.add(opened)
                values[opened] = values[node]
                replace_node(node, opened)
            continue
        if values[right].dim() > 2:  # einsum makes a batch of one
            right = insert_call(model.graph, node, aten.reshape.default, right, list(values[right].shape[-2:]))
        weight = _transposed(model.graph, node, right)
        new = insert_call(model.graph, node, aten.linear.default, left, weight, *bias)
        live.add(new)  # it may be an operand of the next product
        values[new] = values[node]
        replace_node(node, new)


def _has_weight(left: Any, right: Any, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether a product's left factor is live, and its right one a matrix that is not."""
    if left not in live or right in live:
        return False
    shape = values[right].shape
    return 2 <= len(shape) <= max(2, values[left].dim()) and all(size == 1 for size in shape[:-2])


def _transposed(graph: fx.Graph, before: fx.Node, weight: fx.Node) -> fx.Node:
    plain = weight.target is aten.t.default or (
        weight.target in (aten.transpose.int, aten.permute.default)
        and tuple(weight.args[1:]) in ((0, 1), (1, 0), (-2, -1), (-1, -2), ([1, 0],))
    )
    if plain and isinstance(weight.args[0], fx.Node):
        return weight.args[0]
    return insert_call(graph, before, aten.t.default, weight)


def _biases(model: TransformedModel) -> None:
    """linear(x, w) + parameter of shape [out] → linear(x, w, parameter)."""
    live, values = live_values(model)
    for node in list(model.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or node not in live:
            continue
        left, right = node.args
        for product, bias in ((left, right), (right, left)):
            if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or bias in live:
                continue
            fits = product.target is aten.linear.default and len(product.args) == 2 and len(product.users) == 1
            if fits and bias.op == "get_attr" and values[bias].shape == values[product].shape[-1:]:
                new = insert_call(model.graph, node, aten.linear.default, *product.args, bias, like=product)
                replace_node(node, new)
                model.graph.erase_node(product)
                break
