"""Calibration: token batches that a pass runs through the model, and the statistics of norms on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from aero_compile.errors import InputError
from aero_compile.ir.compile_graph import compile_graph
from aero_compile.ir.deviation_norm import bounded_deviation, deviation_norm
from aero_compile.ir.graph_model import remove_dead_nodes
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel

aten = torch.ops.aten


def token_batches(calibration: Any) -> tuple[Tensor, ...]:
    """Token batches int64 `[B, T]`, from one such tensor or an iterable of them, or of dicts with `input_ids`.

    Raises:
        InputError: something else, or no batch at all.
    """
    if isinstance(calibration, Tensor):
        calibration = [calibration]
    if not isinstance(calibration, Iterable) or isinstance(calibration, str | bytes | Mapping):
        raise InputError(f"calibration takes token ids [B, T] or an iterable of them, not {type(calibration).__name__}")
    batches = tuple(batch["input_ids"] if isinstance(batch, Mapping) else batch for batch in calibration)
    for batch in batches:
        if not isinstance(batch, Tensor) or batch.dim() != 2 or batch.is_floating_point() or not batch.numel():
            what = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise InputError(f"calibration takes batches of token ids, integers [B, T], not {what}")
    if not batches:
        raise InputError("calibration has no batch of tokens")
    return batches


@dataclass(frozen=True)
class NormStatistics:
    """What to measure at the norm `node`: the deviation that it divides by, with position 0 apart or not.

    `position` is the dimension of the norm's input that counts token positions, from the last (-2, say), or None for
    one average over all.
    """

    node: fx.Node
    position: int | None = None


def deviations(model: TransformedModel, norms: Sequence[NormStatistics], batches: Sequence[Tensor]) -> list[Tensor]:
    """Average of sqrt(variance + eps) (RMSNorm: of sqrt(mean square + eps)) over all tokens, for each norm.

    The model as it is runs once over every batch, in evaluation mode; nothing but running sums is kept.

    Returns:
        For each norm a float64 tensor on the CPU: `[1]`, or `[2]` with position 0 first where it is apart.

    Raises:
        InputError: tokens that the model cannot take, or position 0 is apart and no sequence is longer than it.
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(model.graph, nodes)
    sums = []
    for norm in norms:
        source, shape = norm.node.args[0], norm.node.args[1]
        assert isinstance(source, fx.Node)
        assert isinstance(shape, Sequence)
        centered, form = norm.node.target is aten.layer_norm.default, "root"
        if norm.node.target is deviation_norm:
            centered, form = bool(norm.node.args[5]), str(norm.node.args[6])
        args = (nodes[source], len(shape), _epsilon(norm.node), centered, form, norm.position)
        sums.append(Rewriter(nodes[norm.node]).call(_sums_of_deviations, *args))
    graph.output(tuple(sums))
    remove_dead_nodes(graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    for name in model.convention.extras:
        if name in inputs:
            raise InputError(f"{model.convention.family} cannot be measured on tokens alone: it takes {name} as well")
    return _averages(model, compile_graph(graph), inputs, batches)


def _averages(model: TransformedModel, run: Any, inputs: Sequence[str], batches: Sequence[Tensor]) -> list[Tensor]:
    device = next(model.parameters()).device
    training = model.training
    totals: list[Tensor] = []
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                tokens = batch.to(device=device, dtype=torch.int64)
                model.check_tokens(tokens)
                found = run(
                    model, *[tokens if n == model.convention.tokens else torch.ones_like(tokens) for n in inputs]
                )
                totals = (
                    [a + b.cpu() for a, b in zip(totals, found, strict=True)] if totals else [b.cpu() for b in found]
                )
    finally:
        model.train(training)
    if any(bool((total[1] == 0).any()) for total in totals):
        raise InputError("calibration with first_token needs sequences of more than one token")
    return [total[0] / total[1] for total in totals]


def _epsilon(norm: fx.Node) -> float | None:
    if norm.target is deviation_norm:
        return float(cast("float", norm.args[4]))
    names = [argument.name for argument in norm.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, norm.args, strict=False)) | dict(norm.kwargs)
    eps = given.get("eps", 1e-5 if norm.target is aten.layer_norm.default else None)
    assert eps is None or isinstance(eps, float | int)
    return eps


def _sums_of_deviations(
    x: Tensor, width: int, eps: float | None, centered: bool, form: str, position: int | None
) -> Tensor:
    """`[2, 1]`: sum and number of the deviations of `x`; or `[2, 2]`, those of position 0 in the first column."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(-width, 0))
    x = x.double()
    x = x - x.mean(dims, keepdim=True) if centered else x
    square = x.square().mean(dims, keepdim=True)
    spread = (square + eps).sqrt() if form == "root" else bounded_deviation(square, eps, form)
    parts = (
        [spread]
        if position is None
        else [spread.narrow(position, 0, 1), spread.narrow(position, 1, spread.shape[position] - 1)]
    )
    return torch.stack(
        [torch.stack([part.sum(), torch.tensor(part.numel(), dtype=x.dtype, device=x.device)]) for part in parts], 1
    )
