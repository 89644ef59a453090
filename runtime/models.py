"""What the runtime asks of a model: its graph, the tokens that it takes, and its values in the clear."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from aero_compile.errors import InputError
from aero_compile.ir.ownership import publish
from aero_compile.ir.rewriter import join_deviation_norms
from aero_compile.ir.usable_weights import check_weights
from aero_compile.optimize import optimize_for_inference
from aero_compile.pipeline import transform
from aero_compile.runtime.lowering.norms import vocabulary
from aero_compile.runtime.lowering.partition import Partition, partition
from aero_compile.runtime.lowering.plaintext import Observer, run_in_the_clear

Tokens = npt.NDArray[np.int64]


def with_graph(model: nn.Module) -> nn.Module:
    """The model itself if it has a graph of its logits, or else captured as it is."""
    if not isinstance(model, nn.Module):
        raise InputError(f"private inference takes a torch.nn.Module, not {type(model).__name__}")
    check_weights(model)
    return model if hasattr(model, "logits_graph") else transform(model, "baseline")


def with_public(model: nn.Module, public: Collection[str]) -> nn.Module:
    """The model with the weights that `public` names given to clients (see `aero_compile.ir.ownership`)."""
    if public and getattr(model, "positions_kept", None) is not None:
        raise InputError(
            "public= names weights as the model was trained, and optimize_for_inference made others of them: give the "
            "model itself, which is optimized here"
        )
    return publish(model, logits_graph(model), public) if public else model


def optimized(model: nn.Module, logits: str, optimize: bool) -> nn.Module:
    """The model after the inference passes; one that has been through them must give the logits asked for."""
    if logits not in ("all", "last"):
        raise InputError(f"logits must be 'all' or 'last', not {logits!r}")
    given = getattr(model, "positions_kept", None)
    if given is not None:
        if given != logits:
            raise InputError(f"this model was optimized for logits={given!r}; ask for the same, not for {logits!r}")
        return model
    if optimize and hasattr(model, "structure"):
        return optimize_for_inference(model, logits=logits)
    if logits == "last":
        raise InputError("logits='last' is a rewrite of the model: leave optimize=True")
    return model


def logits_graph(model: nn.Module) -> fx.Graph:
    """The graph that computes the logits alone."""
    build: Any = model.logits_graph
    graph = build()
    assert isinstance(graph, fx.Graph)
    join_deviation_norms(graph)
    return graph


def checked_ids(model: nn.Module, input_ids: Any) -> Tokens:
    """Return the ids as int64 [B, T], or raise InputError."""
    try:
        ids = np.asarray(input_ids.detach().cpu() if isinstance(input_ids, torch.Tensor) else input_ids)
    except (TypeError, ValueError) as error:
        raise InputError(f"input_ids cannot be read as an array: {error}") from error
    if ids.dtype.kind not in "iu":
        raise InputError(f"input_ids must be integers, not {ids.dtype}")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or 0 in ids.shape:
        raise InputError(f"input_ids must have shape [batch, length], both at least 1, not {list(ids.shape)}")
    longest, size = _declared(model, "max_positions"), _declared(model, "vocab_size")
    if longest is not None and ids.shape[1] > longest:
        raise InputError(f"{ids.shape[1]} tokens are longer than the {longest} positions of the model")
    if size is not None and (ids.min() < 0 or ids.max() >= size):
        wrong = ids.max() if ids.max() >= size else ids.min()
        raise InputError(f"token id {wrong} is outside the vocabulary of {size} tokens")
    return np.ascontiguousarray(ids.astype(np.int64))


def vocabulary_of(model: nn.Module, ids: Tokens) -> int:
    """How many tokens the model knows, as it says or as its graph shows for tokens in the shape of `ids`."""
    return _declared(model, "vocab_size") or vocabulary(partition_for(model, ids))


def partition_for(model: nn.Module, ids: Tokens) -> Partition:
    """The values of the model by who may know them, for tokens in the shape of `ids`."""
    return partition(model, logits_graph(model), ids.shape)


def in_the_clear(model: nn.Module, ids: Tokens, observe: Observer | None = None) -> npt.NDArray[np.float64]:
    """The logits that the model itself computes, float64 [B, T, V], in this process; `observe` is shown its values."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    logits = run_in_the_clear(model, logits_graph(model), torch.from_numpy(ids).to(device), observe)
    return logits.double().cpu().numpy()


def _declared(model: nn.Module, name: str) -> int | None:
    return getattr(model, name, None)
