"""Capture: any decoder-only nn.Module → TransformedModel, through torch.export, without touching the source."""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from aero_compile.capturing.returns import choose_outputs, describe, mark, match_outputs, with_loss
from aero_compile.errors import InputError, UnsupportedModelError
from aero_compile.graphs.convention import CallConvention, Template
from aero_compile.graphs.rewriting import VIEWS, ancestors
from aero_compile.graphs.trainable import TransformedModel, remove_dead_nodes
from aero_compile.quiet import quiet

aten = torch.ops.aten

SAMPLE_BATCH, SAMPLE_LENGTHS = 3, (11, 10, 7, 4, 3, 2)
"""Shape of the sample tokens: sizes of 1 would be baked in, and odd sizes are rarely equal to a model width."""

_OPENED = (aten.einsum.default,)
"""Ops that export keeps whole and that are opened into products and views."""

_LABEL_NAMES = ("labels", "targets", "target", "y")
_MASK_NAMES = ("attention_mask",)
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size", "context")


@dataclass
class _Sample:
    """A call of the source that stands for all calls."""

    kwargs: dict[str, Any]
    tokens: str
    mask: str | None
    labels: str | None
    is_hf: bool


_LOGGERS = ("torch.export", "torch.fx", "torch._dynamo", "torch._subclasses")


def capture(model: nn.Module, example_inputs: Any = None) -> TransformedModel:
    """Capture `model` as a graph of ATen ops with dynamic batch and sequence.

    Args:
        model: a decoder-only transformer, also on the meta device (then no weights are allocated).
        example_inputs: for models that are not from Hugging Face, what their forward takes: the token tensor
            (int64, `[B, T]` with B, T ≥ 2), a tuple of arguments, or a dict of keyword arguments. May be left
            out where the first argument of forward is the token tensor.

    Returns:
        A TransformedModel over copies of the weights; its graph is not canonical yet.

    Raises:
        UnsupportedModelError: the model cannot be exported or returns no logits `[B, T, V]`.
        InputError: the example inputs hold no token tensor.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, TransformedModel):
        return copy.deepcopy(model)
    model = _unwrapped(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder by its config; supported are decoder-only transformers"
        )
    model = _own_copy(model)
    sample, plain, exported = _export_sample(model, example_inputs)
    returned = _call(model, sample.kwargs)
    leaves = pytree.tree_leaves(returned)
    tokens = sample.kwargs[sample.tokens]
    order, logits_view = choose_outputs(returned, leaves, tokens, type(model).__name__, _feeds(exported))
    index = {leaf: position for position, leaf in enumerate(order)}
    shapes = [leaves[i] for i in order]
    full = describe(returned, leaves, index)
    if logits_view is not None:
        mark(full, returned, leaves[order[0]], {"kind": "flat"})
    output = match_outputs(plain, shapes, order, logits_view) if sample.labels else full
    with_labels: Template | None = None
    loss_index = next((n for n, t in enumerate(shapes) if t.dim() == 0), None) if sample.labels else None
    if sample.is_hf:
        with_labels = with_loss(output)
    elif loss_index is not None:
        with_labels = full
    convention = CallConvention(
        family=type(model).__name__,
        arguments=tuple(_parameters(model)),
        tokens=sample.tokens,
        attention_mask=sample.mask,
        labels="labels" if sample.is_hf else sample.labels,
        output=output,
        output_with_labels=with_labels,
        loss_index=loss_index,
    )
    program, graph = _clean_graph(exported, order, logits_view is not None)
    tensors = _named_tensors(model, program, graph)
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]}
    lifted = {name for name, tensor in tensors.items() if name not in own and not isinstance(tensor, nn.Parameter)}
    return TransformedModel(
        graph,
        tensors,
        {},
        convention,
        non_persistent=_non_persistent(model) | lifted,
        max_positions=_max_positions(model, exported, sample),
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself inside torch.compile, DataParallel or DistributedDataParallel."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast("nn.Module", model._orig_mod)
        else:
            return model


def _own_copy(model: nn.Module) -> nn.Module:
    """A copy in training mode (evaluation mode would lose attention dropout), with caches off."""
    memo: dict[int, Any] = {}
    for parameter in [*model.parameters(), *model.buffers()]:
        if type(parameter).__name__ == "FakeTensor" or "FakeTensor" in repr(type(parameter.data)):
            twin: Tensor = torch.empty_like(parameter, device="meta")
            if isinstance(parameter, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=parameter.requires_grad)
            memo[id(parameter)] = twin
    try:
        model = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be copied: {error}") from error
    config = getattr(model, "config", None)
    for switch in ("use_cache", "layerdrop"):
        if hasattr(config, switch):
            setattr(config, switch, False if switch == "use_cache" else 0.0)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        cast("Any", model).gradient_checkpointing_disable()
    return model.train()


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keyword = (*kinds, inspect.Parameter.KEYWORD_ONLY)
    return {n: p for n, p in inspect.signature(model.forward).parameters.items() if p.kind in keyword}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _export_sample(model: nn.Module, example_inputs: Any) -> tuple[_Sample, Any, torch.export.ExportedProgram]:
    """A call that the model takes, what it returns without labels, and the program exported from it.

    Tokens that are made up get another length if the model refuses them, or if they are exactly as long as one of
    its buffers: slicing all of a buffer would fix the length.
    """
    lengths = SAMPLE_LENGTHS if example_inputs is None else SAMPLE_LENGTHS[:1]
    refused: UnsupportedModelError | None = None
    for length in lengths:
        try:
            sample = _sample_call(model, example_inputs, length)
            plain = _call(model, {k: v for k, v in sample.kwargs.items() if k != sample.labels})
        except UnsupportedModelError as error:
            refused = refused or error  # what is wrong with the usual length tells most
            if length == lengths[-1]:
                raise refused from refused.__cause__
            continue
        try:
            return sample, plain, _export(model, sample)
        except UnsupportedModelError as error:
            if length == lengths[-1] or "specializ" not in str(error.__cause__):
                raise
    raise AssertionError("unreachable")


def _sample_call(model: nn.Module, example_inputs: Any, length: int) -> _Sample:
    """The call to capture, from the user's example or made up from the signature."""
    names = _parameters(model)
    if not names:
        raise UnsupportedModelError(f"{type(model).__name__}.forward takes no named arguments")
    is_hf = hasattr(getattr(model, "config", None), "to_dict") and "input_ids" in names
    if example_inputs is None:
        tokens = "input_ids" if is_hf else next(iter(names))
        kwargs: dict[str, Any] = {tokens: _made_up_tokens(model, length)}
    elif isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    else:
        args = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
        kwargs = dict(zip(names, args, strict=False))
    found = [name for name, value in kwargs.items() if _is_tokens(value)]
    if not found:
        raise InputError("example_inputs holds no token tensor: an int64 tensor of shape [batch, sequence] is needed")
    tokens = "input_ids" if "input_ids" in found else found[0]
    ids = kwargs[tokens]
    if min(ids.shape) < 2:
        raise InputError(f"example tokens need batch and sequence of at least 2, got {list(ids.shape)}")
    if is_hf:
        mask = next((name for name in _MASK_NAMES if name in names), None)
        kwargs = {tokens: ids} | ({mask: torch.ones_like(ids)} if mask else {})
        if "use_cache" in names:
            kwargs["use_cache"] = False
        return _Sample(kwargs, tokens, mask, None, True)
    labels = next((name for name in _LABEL_NAMES if name in names and name != tokens), None)
    if labels is not None and kwargs.get(labels) is None:
        kwargs[labels] = ids.clone()
    mask = next((name for name in _MASK_NAMES if name in kwargs), None)
    return _Sample(kwargs, tokens, mask, labels, False)


def _made_up_tokens(model: nn.Module, length: int) -> Tensor:
    weight = next(model.parameters(), None)
    device = weight.device if weight is not None else torch.device("cpu")
    config = getattr(model, "config", None)
    vocab = next((int(v) for n in ("vocab_size", "n_vocab") if (v := getattr(config, n, None))), None)
    if vocab is None:
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        tables += [p.shape[0] for p in model.parameters() if p.dim() == 2]
        vocab = min(tables, default=2)
    limit = _config_positions(model)
    length = max(2, length if limit is None else min(length, limit - 1))
    return torch.arange(SAMPLE_BATCH * length, device=device).reshape(SAMPLE_BATCH, length) % vocab


def _call(model: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """What the model returns for the sample; on the meta device, so only shapes are computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), quiet(_LOGGERS):
            fake = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            tensors = {
                f"{path}.{name}" if path else name: tensor
                for path, module in model.named_modules()  # each module once, also if blocks share it
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]
                if tensor is not None
            }
            state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
            return torch.func.functional_call(model, state, (), fake, tie_weights=False)
    except Exception as error:
        raise UnsupportedModelError(_call_failed(model, kwargs, error)) from error


def _call_failed(model: nn.Module, kwargs: Mapping[str, Any], error: Exception) -> str:
    what = ", ".join(
        f"{k}: {list(v.shape)} {v.dtype}" if isinstance(v, Tensor) else f"{k}={v}" for k, v in kwargs.items()
    )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    found = _foreign(model) or f"{type(model).__name__} could not be run on token ids"
    return (
        f"{found} ({what}: {first}); supported are decoder-only transformers that map "
        "int64 token ids [B, T] to logits [B, T, V] (pass example_inputs if its arguments differ)"
    )


_FOREIGN = {
    "recurrent layers": ("rnn", "lstm", "gru", "rwkv", "recurrent"),
    "a state-space layer": ("mamba", "mixer2", "ssm", "shortconv"),
    "experts that a router chooses": ("experts", "router", "moe"),
    "linear attention": ("lightningattention", "gateddeltanet", "linearattention", "kimidelta"),
}
"""What a model may hold that is not supported: parts of the names of classes, for error messages alone."""


def _foreign(model: nn.Module) -> str:
    """What the model has that is probably why it failed, as the beginning of a sentence; empty if nothing is known."""
    for name, module in model.named_modules():
        for what, parts in _FOREIGN.items():
            if (
                name
                and not type(module).__name__.endswith("Model")
                and any(part in type(module).__name__.lower() for part in parts)
            ):
                return f"{type(model).__name__} has {what} ({type(module).__name__} at {name}), which is not supported"
    return ""


def _functional(model: nn.Module, sample: _Sample, dims: Mapping[str, Any]) -> torch.export.ExportedProgram:
    program = torch.export.export(model, (), sample.kwargs, dynamic_shapes=dict(dims), strict=False)
    if all(_is_functional(part.graph) for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)):
        return program  # tracing it again, as below, would take twice as long as the export
    known = torch.export.default_decompositions()
    opened: torch.export.ExportedProgram = program.run_decompositions({op: known[op] for op in _OPENED})
    return opened


_KEPT_VIEWS = VIEWS | {
    *(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.select.int),
    *(aten.numpy_T.default, aten.t.default, aten.detach.default, aten.type_as.default),
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other),
}
"""Ops that may return a view of their input and that what follows understands."""


def _is_functional(graph: fx.Graph) -> bool:
    """Whether no op of an exported graph writes to its inputs or has to be opened."""
    for node in graph.nodes:
        op = node.target
        if isinstance(op, torch._ops.OpOverload):
            views = any(result.alias_info for result in op._schema.returns)
            if op._schema.is_mutable or op in _OPENED or (views and op not in _KEPT_VIEWS):
                return False
        elif isinstance(op, torch._ops.OperatorBase) and not _is_inlined(node):
            return False
    return True


def _is_inlined(node: fx.Node) -> bool:
    """Whether `node` runs a part of the model without gradients, or without autocast, and does nothing else."""
    higher = torch.ops.higher_order
    if node.target is higher.wrap_with_autocast:
        return node.args[2] is False
    return node.target is higher.wrap_with_set_grad_enabled


def _inline(module: nn.Module, graph: fx.Graph) -> None:
    """Put the parts that `_is_inlined` nodes of `graph` run in their place."""
    todo = [node for node in graph.nodes if node.op == "call_function" and _is_inlined(node)]
    while todo:
        node = todo.pop()
        first = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        path = cast("fx.Node", node.args[first]).target
        part = cast("fx.GraphModule", module.get_submodule(str(path))).graph
        inner = dict(zip(part.find_nodes(op="placeholder"), cast("Any", node.args[first + 1 :]), strict=True))
        given = set(inner)
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(part, inner)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        for copied in [inner[n] for n in part.nodes if n in inner and n not in given]:
            if copied.op == "get_attr":
                copied.target = f"{path}.{copied.target}"
            elif copied.op == "call_function" and _is_inlined(copied):
                todo.append(copied)


def _export(model: nn.Module, sample: _Sample) -> torch.export.ExportedProgram:
    dynamic = torch.export.Dim.DYNAMIC
    shape = sample.kwargs[sample.tokens].shape
    dims = {
        name: {0: dynamic, 1: dynamic} if isinstance(value, Tensor) and value.shape == shape else None
        for name, value in sample.kwargs.items()
    }
    try:
        with quiet(_LOGGERS):
            program = _functional(model, sample, dims)
            updated = program.graph_signature.buffers_to_mutate.values()
            for buffer in updated:  # in training, by a power iteration, say: keep its module as it is in evaluation
                model.get_submodule(buffer.rpartition(".")[0]).eval()
            return _functional(model, sample, dims) if updated else program
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"{_foreign(model) or type(model).__name__ + ' could not be captured'} (torch.export: {first}); supported "
            "are decoder-only transformers without data-dependent Python control flow"
        ) from error


def _feeds(exported: torch.export.ExportedProgram) -> Callable[[int, int], bool]:
    """Whether the flat output with the second number is computed from the one with the first."""
    nodes = {node.name: node for node in exported.graph.nodes}
    outputs = [nodes.get(str(name)) for name in exported.graph_signature.user_outputs]

    def feeds(first: int, second: int) -> bool:
        source, result = outputs[first], outputs[second]
        return source is not None and result is not None and source in ancestors([result], set(nodes.values()))

    return feeds


def _clean_graph(
    exported: torch.export.ExportedProgram, order: Sequence[int], flat_logits: bool
) -> tuple[nn.Module, fx.Graph]:
    """The exported program's graph with plain inputs and a flat tuple of outputs."""
    with quiet(_LOGGERS):
        module = exported.module(check_guards=False)
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, nodes)
    outputs = [pytree.tree_leaves(results)[i] for i in order]
    if flat_logits:
        outputs[0] = outputs[0].args[0]
    graph.output(tuple(outputs))
    _inline(module, graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.users and str(node.target).startswith(_CHECKS):
            graph.erase_node(node)
    remove_dead_nodes(graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
        node.meta = {k: v for k, v in node.meta.items() if k == "nn_module_stack"}
    return module, graph


_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata", "<built-in function assert")


def _named_tensors(model: nn.Module, program: nn.Module, graph: fx.Graph) -> dict[str, Tensor]:
    """Tensors the graph reads, under every name the source knows them by (so tied weights stay tied)."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    lifted = dict(program.named_parameters(remove_duplicate=False)) | dict(
        program.named_buffers(remove_duplicate=False)
    )
    read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    used: dict[str, Tensor] = {}
    for name in dict.fromkeys(read):
        value = own.get(name, lifted.get(name))
        if value is None:
            value = operator.attrgetter(name)(program)
        used[name] = value
    identities = {id(tensor) for tensor in used.values()}
    aliases = {name: tensor for name, tensor in own.items() if id(tensor) in identities}
    return {name: t for name, t in own.items() if name in aliases} | {n: t for n, t in used.items() if n not in aliases}


def _non_persistent(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    )


def _config_positions(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    values = [getattr(config, name, None) for name in _POSITION_LIMITS]
    found = [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return found[0] if found else None


def _max_positions(model: nn.Module, exported: torch.export.ExportedProgram, sample: _Sample) -> int | None:
    """The tightest limit on T that the config or the export's shape constraints state."""
    limits = [_config_positions(model)]
    for value in exported.range_constraints.values():
        upper = float(value.upper)
        if math.isfinite(upper) and upper < 2**31:
            limits.append(int(upper))
    found = [limit for limit in limits if limit is not None]
    return min(found) if found else None
