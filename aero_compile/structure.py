"""Find the parts of a decoder in its canonical graph: attention, feed-forward, norms, residual merges.

Everything is found from data flow. Module names captured from the source are used for messages and to decide
which layer a norm belongs to where the flow alone leaves a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.errors import UnsupportedGraphError, UnsupportedModelError
from aero_compile.rewriting import (
    VIEWS,
    ancestors,
    is_floating,
    live_inputs,
    node_values,
    place,
    source_path,
    tainted_nodes,
    through_views,
)
from aero_compile.trainable import TransformedModel

aten = torch.ops.aten

NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})

ACTIVATIONS: Mapping[Any, str] = {
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.leaky_relu.default: "leaky_relu",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.elu.default: "elu",
    aten.mish.default: "mish",
    aten.softplus.default: "softplus",
    aten.hardswish.default: "hardswish",
    aten.hardtanh.default: "hardtanh",
}
"""Nonlinear element-wise ops, and the kind they are counted as."""

_ROUTERS = frozenset({aten.topk.default, aten.sort.default, aten.argsort.default, aten.bincount.default})
_SCORE_OPS = frozenset(
    {
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.maximum.default,
        aten.clamp.default,
        aten.tanh.default,
        aten.type_as.default,
    }
)
_BRANCH_OPS = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.type_as.default})
_FFN_OPS = frozenset(
    {
        *ACTIVATIONS,
        *NORMS,
        *_BRANCH_OPS,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.pow.Tensor_Scalar,
        aten.square.default,
        aten.abs.default,
        aten.exp.default,
        aten.erf.default,
        aten.clamp.default,
        aten.minimum.default,
        aten.maximum.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.select.int,
    }
)


@dataclass(frozen=True)
class Attention:
    """One attention: `scores` is the raw product QKᵀ, `softmax` the node that normalizes it over keys."""

    layer: int
    softmax: fx.Node
    scores: fx.Node
    heads: int
    name: str


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward block.

    Attributes:
        entry: live value that every in-projection reads.
        inputs: in-projections; one, or two for a gated block.
        output: out-projection.
        activations: nonlinear element-wise nodes between them; empty for a linear block.
        branch: (add, argument) edge where the block's result joins the residual stream.
        residual: (add, argument) edges of everything the result is added to, up to the residual stream.
    """

    layer: int
    entry: fx.Node
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    activations: tuple[fx.Node, ...]
    branch: tuple[fx.Node, fx.Node]
    residual: tuple[tuple[fx.Node, fx.Node], ...]
    name: str


@dataclass(frozen=True)
class Norm:
    """One LayerNorm or RMSNorm; `layer` is None for the final one."""

    layer: int | None
    node: fx.Node
    name: str


@dataclass(frozen=True)
class Structure:
    """The parts of a decoder, in layer order. `values` holds the fake value of each node at a sample shape."""

    embedding: fx.Node
    vocab_size: int
    attentions: tuple[Attention, ...]
    ffns: tuple[FeedForward, ...]
    norms: tuple[Norm, ...]
    live: set[fx.Node] = field(repr=False)
    values: Mapping[fx.Node, Any] = field(repr=False)


def find_structure(model: TransformedModel) -> Structure:
    """Find the parts of `model`.

    Raises:
        UnsupportedModelError: the graph is no causal decoder (no attention softmax, a router, attention that
            looks ahead, …); the message says what was found.
    """
    graph = model.logits_nodes()
    length = 11 if model.max_positions is None else max(2, min(11, model.max_positions))
    values = node_values(model, 3, length)
    tainted = tainted_nodes(model.graph, model.convention.tokens)
    live = {n for n in tainted if n in graph and is_floating(values.get(n)) and n.op != "output"}
    embedding = _embedding(model, live, tainted, values)
    _refuse_routers(model, tainted & graph)
    order = [node for node in model.graph.nodes if node in live]
    attentions = _attentions(model, order, live, values)
    ffns = tuple(_ffns(order, live, attentions))
    norms = tuple(_norms(order, live, attentions, ffns))
    rows = int(values[embedding.args[0]].shape[0])
    return Structure(embedding, rows, attentions, ffns, norms, live, values)


def _embedding(
    model: TransformedModel, live: set[fx.Node], tainted: set[fx.Node], values: Mapping[fx.Node, Any]
) -> fx.Node:
    """The lookup of token vectors: the first live node that is indexed by tokens."""
    for node in model.graph.nodes:
        if node not in live:
            continue
        table = node.args[0] if node.args else None
        if node.target is aten.embedding.default and node.args[1] in tainted:
            return node
        if node.target is aten.index.Tensor and isinstance(table, fx.Node) and values[table].dim() == 2:
            return node
    raise UnsupportedModelError(
        f"no token embedding found in {model.convention.family}: no table is looked up with "
        f"{model.convention.tokens}; supported are decoder-only transformers over token ids"
    )


def _refuse_routers(model: TransformedModel, tainted: set[fx.Node]) -> None:
    for node in model.graph.nodes:
        if node in tainted and node.target in _ROUTERS:
            raise UnsupportedModelError(
                f"{model.convention.family} routes tokens to experts ({node.target} at {place(node)}); "
                "mixture-of-experts models are not supported, dense decoder-only transformers are"
            )


def _attentions(
    model: TransformedModel, order: Sequence[fx.Node], live: set[fx.Node], values: Mapping[fx.Node, Any]
) -> tuple[Attention, ...]:
    found: list[Attention] = []
    others: list[fx.Node] = []
    for node in order:
        if node.target is not aten.softmax.int:
            continue
        scores = _scores(node, live)
        if scores is None:
            others.append(node)
            continue
        batch = 3
        heads = values[node].numel() // (batch * values[node].shape[-1] * values[node].shape[-2])
        found.append(Attention(len(found), node, scores, heads, source_path(node)))
    family = model.convention.family
    if others:
        raise UnsupportedModelError(
            f"{family} has a softmax that is not over attention scores at {place(others[0])}; supported are "
            "dense decoder-only transformers with softmax attention"
        )
    if not found:
        kinds = sorted({str(n.target) for n in order if n.target in ACTIVATIONS or n.target in NORMS})
        raise UnsupportedModelError(
            f"no attention softmax found in {family} (found: {', '.join(kinds) or 'no nonlinear op'}); "
            "supported are decoder-only transformers with softmax attention"
        )
    _require_causal(model, found, live)
    return tuple(found)


def _scores(softmax: fx.Node, live: set[fx.Node]) -> fx.Node | None:
    """The product of two live values that `softmax` normalizes, seen through scale, bias and mask."""
    node = softmax.args[0]
    while isinstance(node, fx.Node):
        inputs = live_inputs(node, live)
        if node.target is aten.matmul.default and len(inputs) == 2:
            return node
        if len(inputs) != 1 or (node.target not in _SCORE_OPS and node.target not in VIEWS):
            return None
        node = inputs[0]
    return None


def _require_causal(model: TransformedModel, found: Sequence[Attention], live: set[fx.Node]) -> None:
    """Evaluate the masks, which depend on shapes alone, and refuse attention that sees later positions."""
    length = 5 if model.max_positions is None else max(2, min(5, model.max_positions))
    constants: dict[fx.Node, Any] = {}
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    for attention in found:
        masks = list(_masks(attention, live))
        hidden = torch.zeros(length, length, dtype=torch.bool)
        unknown = False
        for node, mask in masks:
            value = _evaluate(model, mask, length, constants)
            if value is None:  # a buffer without values, on the meta device
                unknown = True
            elif value.dim() >= 2 and value.shape[-1] == length:
                hidden |= _hides(node, value, live).reshape(-1, value.shape[-2], length).all(0)
        if not unknown and not hidden[ahead].all():
            raise UnsupportedModelError(
                f"attention of layer {attention.layer} ({place(attention.softmax)}) is not causal: "
                f"{'its mask lets' if masks else 'no mask stops'} positions see later ones; supported are "
                "decoder-only transformers"
            )


def _masks(attention: Attention, live: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node, constant it combines with the scores) on the way from the product to the softmax."""
    node = attention.softmax.args[0]
    while isinstance(node, fx.Node) and node is not attention.scores:
        for parent in node.all_input_nodes:
            if parent not in live:
                yield node, parent
        node = live_inputs(node, live)[0]
    for parent in attention.scores.all_input_nodes:
        if parent not in live:
            yield attention.scores, parent


def _hides(node: fx.Node, value: Tensor, live: set[fx.Node]) -> Tensor:
    """Which scores a mask hides, as it is used by `node`."""
    if value.dtype != torch.bool:
        return value.double() < -1e3
    keeps = node.target in (aten.where.self, aten.where.ScalarOther) and node.args[1] in live
    return ~value if keeps else value


def _evaluate(model: TransformedModel, node: fx.Node, length: int, known: dict[fx.Node, Any]) -> Tensor | None:
    """Value of a node that depends on shapes and buffers alone, at batch 1; None if it needs a weight."""

    def value_of(current: fx.Node) -> Any:
        if current in known:
            return known[current]
        if current.op == "placeholder":
            known[current] = torch.ones(1, length, dtype=torch.int64)
        elif current.op == "get_attr":
            parent, _, leaf = str(current.target).rpartition(".")
            module = model.get_submodule(parent)
            buffer = module._buffers.get(leaf)
            if buffer is None or buffer.device.type == "meta":
                raise LookupError(current.name)
            known[current] = buffer.detach().cpu()
        else:
            args, kwargs = fx.map_arg((current.args, current.kwargs), value_of)
            kwargs = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
            known[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        return known[current]

    try:
        result = value_of(node)
    except (LookupError, RuntimeError, RecursionError):
        return None
    return result if isinstance(result, Tensor) else None


def _ffns(
    order: Sequence[fx.Node], live: set[fx.Node], attentions: Sequence[Attention]
) -> Iterator[FeedForward]:
    """Feed-forward blocks: two linear layers in a row whose result is added to what the first one reads."""
    softmaxes = [attention.softmax for attention in attentions]
    found: list[FeedForward] = []
    for node in order:
        if node.target is not aten.linear.default:
            continue
        inner = _ffn_inside(node, live)
        if inner is None:
            continue
        inputs, activations = inner
        entries = {_live_operand(linear, live) for linear in inputs}
        bases = {through_views(entry) for entry in entries}
        if len(bases) != 1:
            continue
        entry = bases.pop()
        merge = _merge(node, entry, live)
        if merge is None:
            continue
        branch, residual = merge
        name = source_path(node).rpartition(".")[0] or source_path(node)
        found.append(FeedForward(len(found), entry, inputs, node, activations, branch, residual, name))
    if len(found) == len(attentions):
        yield from found
        return
    for ffn in found:
        above = ancestors([ffn.output], live)
        layer = sum(softmax in above for softmax in softmaxes) - 1
        yield FeedForward(**(vars(ffn) | {"layer": max(layer, 0)}))


def _live_operand(node: fx.Node, live: set[fx.Node]) -> fx.Node:
    return live_inputs(node, live)[0]


def _ffn_inside(
    output: fx.Node, live: set[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """In-projections and activations above the linear node `output`, if nothing but an FFN is there."""
    inputs: dict[fx.Node, None] = {}
    activations: dict[fx.Node, None] = {}
    stack = [_live_operand(output, live)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.linear.default:
            inputs[node] = None
            continue
        getitem = getattr(node.target, "__name__", "") == "getitem"
        inside = node.target in _FFN_OPS or node.target in VIEWS or node.op == "call_module" or getitem
        if not inside or len(seen) > 64:
            return None
        if node.target in ACTIVATIONS:
            activations[node] = None
        stack.extend(live_inputs(node, live))
    return (tuple(inputs), tuple(reversed(activations))) if inputs else None


def _merge(
    output: fx.Node, entry: fx.Node, live: set[fx.Node]
) -> tuple[tuple[fx.Node, fx.Node], tuple[tuple[fx.Node, fx.Node], ...]] | None:
    """Follow the FFN's result to the add with the residual stream it came from."""
    bases = _bases(entry, live)
    node, branch = output, None
    residual: list[tuple[fx.Node, fx.Node]] = []
    for _ in range(12):
        users = [user for user in node.users if user in live]
        if len(users) != 1:
            return None
        user = users[0]
        if user.target is aten.add.Tensor and len(live_inputs(user, live)) == 2:
            sibling = next(p for p in live_inputs(user, live) if p is not node)
            branch = branch or (user, node)
            residual.append((user, sibling))
            if _adds_up(sibling, bases, live):
                return branch, tuple(residual)
        elif user.op != "call_module" and user.target not in _BRANCH_OPS and user.target not in VIEWS:
            if user.target not in NORMS and user.target is not aten.add.Tensor:
                return None
        node = user
    return None


def _bases(entry: fx.Node, live: set[fx.Node]) -> set[fx.Node]:
    """Values that are the residual stream behind `entry`: itself, and what its norm was applied to."""
    bases = {entry}
    node = entry
    while True:
        below = through_views(node)
        if below.target in NORMS or below.op == "call_module":
            below = through_views(live_inputs(below, live)[0])
        if below is node:
            return bases
        bases.add(below)
        node = below


def _adds_up(node: fx.Node, bases: set[fx.Node], live: set[fx.Node], depth: int = 4) -> bool:
    """Whether `node` is a sum that one of `bases` is a term of."""
    node = through_views(node)
    if node in bases:
        return True
    passes = node.target in _BRANCH_OPS or node.op == "call_module" or node.target is aten.add.Tensor
    return depth > 0 and passes and any(_adds_up(p, bases, live, depth - 1) for p in live_inputs(node, live))


def _norms(
    order: Sequence[fx.Node],
    live: set[fx.Node],
    attentions: Sequence[Attention],
    ffns: Sequence[FeedForward],
) -> Iterator[Norm]:
    prefixes = _block_prefixes([attention.name for attention in attentions])
    softmaxes = [attention.softmax for attention in attentions]
    for node in order:
        if node.target not in NORMS:
            continue
        name = source_path(node)
        layer: int | None = next(
            (i for i, prefix in enumerate(prefixes) if name == prefix or name.startswith(prefix + ".")), None
        )
        if layer is None:
            layer = next((ffn.layer for ffn in ffns if ffn.entry is node), None)
        if layer is None:
            above = ancestors([node], live)
            passed = sum(softmax in above for softmax in softmaxes)
            layer = passed if passed < len(softmaxes) else None
        yield Norm(layer, node, name)


def _block_prefixes(names: Sequence[str]) -> list[str]:
    """Module path of each block (`transformer.h.3`), from the paths of its attention; empty if not named."""
    split = [name.split(".") for name in names]
    if len(names) == 1:
        numbers = [i for i, part in enumerate(split[0]) if part.isdigit()]
        return [".".join(split[0][: numbers[0] + 1])] if numbers else []
    for depth in range(min(len(parts) for parts in split)):
        if len({parts[depth] for parts in split}) == len(names):
            return [".".join(parts[: depth + 1]) for parts in split]
    return []


def position_limit(model: TransformedModel) -> int | None:
    """Longest sequence that the position table allows, or None if positions are not looked up in one."""
    tainted = tainted_nodes(model.graph, model.convention.tokens)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    limits = []
    for node in model.graph.nodes:
        lookup = node.target is aten.embedding.default and node not in tainted
        if not lookup or node.args[0].op != "get_attr" or node.args[0].target not in parameters:
            continue
        index = _evaluate(model, node.args[1], 2, {})
        if index is not None and index.numel():
            limits.append(parameters[node.args[0].target].shape[0] - int(index.max()) + 1)
    return min(limits, default=None)


def require_ffns(structure: Structure, looking_for: str) -> tuple[FeedForward, ...]:
    """The FFNs, or an UnsupportedGraphError that says what was looked for and what was nearest."""
    if structure.ffns:
        return structure.ffns
    linear = [n for n in structure.live if n.target is aten.linear.default]
    nearest = place(linear[-1]) if linear else "no linear layer at all"
    raise UnsupportedGraphError(
        f"no feed-forward block found for {looking_for}: two linear layers in a row whose result is added to "
        f"the residual stream (nearest: {nearest})"
    )
