"""Private inference in one call: validate, lower, compile, run two parties, return the client's logits."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aero_compile.calibration import token_batches
from aero_compile.errors import InputError
from aero_compile.files import make_private_folder, write_private
from aero_compile.ir.ops import NORMS
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Tolerances
from aero_compile.runtime.hosts.measure import Measurement, combine
from aero_compile.runtime.hosts.network_spec import Network, parse_network
from aero_compile.runtime.hosts.parties import LOOPBACK, run_parties
from aero_compile.runtime.hosts.progress import Progress
from aero_compile.runtime.hosts.tls import TLSConfig
from aero_compile.runtime.lowering.defer import defer_normalization
from aero_compile.runtime.lowering.guards import GuardCheck
from aero_compile.runtime.lowering.live import LiveProgram
from aero_compile.runtime.lowering.norms import (
    NO_DOUBLINGS,
    Doublings,
    NormSample,
    fold,
    foldable,
    random_tokens,
    vocabulary,
)
from aero_compile.runtime.lowering.partition import Observer, Partition, partition
from aero_compile.runtime.lowering.ranges import RangeCheck
from aero_compile.runtime.lowering.spu_compile import compile_steps
from aero_compile.runtime.lowering.to_jax import lower
from aero_compile.runtime.operators.limits import Format
from aero_compile.runtime.program import Program
from aero_compile.runtime.rehearsal import check_logits
from aero_compile.runtime.spu_config import check_config, import_spu


@dataclass(frozen=True)
class Compiled:
    """A model compiled for one shape: the public program, and the weights that only the server may hold."""

    program: Program
    weights: dict[str, npt.NDArray[Any]]


def private_inference(
    model: torch.nn.Module,
    input_ids: Any,
    protocol: str = "cheetah",
    *,
    logits: str = "all",
    optimize: bool = True,
    calibration: Any = None,
    clamp: bool = True,
    guards: bool = False,
    tolerances: Tolerances = DEFAULT,
    field: int = 64,
    fraction_bits: int = 18,
    warm: bool | str = True,
    timeout: float = 3600.0,
    progress: bool | None = None,
    tls: TLSConfig | None = None,
    network: str | Network | None = None,
) -> tuple[npt.NDArray[np.float32], Measurement]:
    """Run `model` on `input_ids` in two-party computation between two processes of this machine.

    Args:
        model: a transformed model (`aero_compile.transform`), or any decoder, which is captured as it is.
        input_ids: integer token ids, torch or NumPy, [B, T] (or [T], taken as one sequence).
        protocol: "cheetah" (secure against semi-honest parties) or "semi2k" (fast; its correlated
            randomness comes from the server, so it is for tests, not for privacy).
        logits: "all" positions, or the "last" alone, which is all that the next token needs and much cheaper.
        optimize: rewrite the model with `aero_compile.optimize_for_inference` first (a model that this function
            returned is run as it is).
        calibration: batches of token ids [B, T] of typical text, on which the ranges of all values are checked.
        clamp: exponentials hold for any scores. False takes the cheapest ones that hold where scores spread no further
            than 1.25 times what `calibration` showed; beyond, attention is wrong, and between two hosts nobody
            notices. The program then tells the client how far scores spread.
        guards: check privately that no value leaves the range on which operators hold, as programs for two hosts do by
            default. Here the model is evaluated in the clear first, which shows the same and names the place.
        tolerances: how far off the approximated functions may be, each by itself (`aero_compile.runtime.approximations`
            tells what they cost), and the logits: a rehearsal of the program in the clear refuses what is further off.
        field: ring size in bits; fraction_bits: fixed-point fraction bits.
        warm: True runs twice in the same processes and measures the second forward, without one-time set-up;
            "setup" sets the parties up by a short computation and measures the first forward; False measures the
            first forward with the set-up.
        timeout: seconds for the computation.
        progress: show the running operator on standard error; None: only on a terminal.
        tls: certificates for an encrypted link; they must name 127.0.0.1, where both parties are, or `peer_name`.
        network: what to emulate between the two processes: "lan", "wan", "MBPS:RTT_MS" or a `Network`; None:
            nothing.

    Returns:
        The client's logits, float32 [B, T, V] (or [B, 1, V]), and the Measurement.

    Raises:
        InputError: tokens, shapes or options that the model or the protocol cannot take.
        LoweringError: the model computes something that cannot be run privately, values too large for the
            fixed-point format, or logits that would be further off than `tolerances` allow.
        PartyError: a party failed or was lost.
        RuntimeUnavailableError: SPU is not installed.
    """
    check_config(protocol, field, fraction_bits)
    if not timeout > 0:
        raise InputError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if tls is not None:
        tls.check(tls.peer_name or LOOPBACK)
    emulated = parse_network("loopback" if network is None else network)
    import_spu()
    if warm not in (True, False, "setup"):
        raise InputError(f"warm must be True, False or 'setup', not {warm!r}")
    given = _with_graph(model)
    ids = _checked_ids(given, input_ids)
    with Progress(progress) as shown:
        shown.say("compiling")
        graph_model = _optimized(given, logits, optimize)
        compiled, exact = _compile(
            graph_model, ids, protocol, field, fraction_bits, calibration, clamp, guards, tolerances
        )
        if tolerances.logits is not None:
            shown.say("rehearsing in the clear")
            _rehearsed(compiled, given, ids, tolerances.logits, exact, "these tokens")
        outcome = run_parties(
            compiled.program,
            compiled.weights,
            ids,
            runs=2 if warm is True else 1,
            set_up=warm == "setup",
            timeout=timeout,
            tls=tls,
            on_event=shown.event,
            network=emulated,
        )
    versions = {
        "aero_compile": str(importlib.import_module("aero_compile").__version__),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    shape = (int(ids.shape[0]), int(ids.shape[1]))
    warm_up = warm if isinstance(warm, str) else "full" if warm else "none"
    bill = combine(compiled.program, outcome.stats, shape, versions, list(sys.argv), warm_up, str(emulated))
    return outcome.logits, bill


def compile_model(
    model: torch.nn.Module,
    batch: int,
    length: int,
    protocol: str = "cheetah",
    *,
    logits: str = "all",
    optimize: bool = True,
    calibration: Any = None,
    clamp: bool = True,
    guards: bool = True,
    tolerances: Tolerances = DEFAULT,
    field: int = 64,
    fraction_bits: int = 18,
) -> Compiled:
    """Compile `model` for token ids [batch, length], without any tokens.

    Options and errors are those of `private_inference`. There are no real inputs here to check ranges against:
    `guards` lets the two parties find out, in a run, that a value left the range on which an operator holds; they
    learn this one bit and no logits then. Typical text as `calibration` shows before whether that will happen.
    The logits are rehearsed on that text, cut or repeated to [batch, length], or else on random tokens.
    """
    check_config(protocol, field, fraction_bits)
    import_spu()
    given = _with_graph(model)
    ids = _checked_ids(given, np.zeros((batch, length), np.int64))
    graph_model = _optimized(given, logits, optimize)
    compiled, exact = _compile(
        graph_model, ids, protocol, field, fraction_bits, calibration, clamp, guards, tolerances, check_ranges=False
    )
    if tolerances.logits is not None:
        known = calibration is not None
        text = "the calibration text" if known else "random tokens (calibration= takes typical text instead)"
        ids = _text(graph_model, calibration, ids) if known else _random_text(graph_model, ids)
        _rehearsed(compiled, given, ids, tolerances.logits, exact, text)
    return compiled


def export(compiled: Compiled, directory: str | os.PathLike[str]) -> None:
    """Write `program.json` (for both parties) and `weights.npz` (for the server only, mode 0600).

    The folder is made with mode 0700 if it does not exist.
    """
    target = Path(directory)
    make_private_folder(target)
    compiled.program.save(target / "program.json")
    write_private(target / "weights.npz", lambda file: np.savez(file, **compiled.weights))


MARGIN = 1.25
"""Scores may spread this much further than on the calibration text."""


def _calibrated(model: torch.nn.Module, calibration: Any, ranges: RangeCheck) -> dict[str, float]:
    """Run calibration text past the check; returns how far the scores of each softmax may spread."""
    if calibration is None:
        return {}
    for batch in token_batches(calibration):
        _partition(model, _checked_ids(model, batch), ranges)
    return {name: MARGIN * spread for name, spread in ranges.spreads.items()}


def _compile(
    model: torch.nn.Module,
    ids: npt.NDArray[np.int64],
    protocol: str,
    field: int,
    fraction_bits: int,
    calibration: Any,
    clamp: bool,
    guards: bool,
    tolerances: Tolerances,
    check_ranges: bool = True,
) -> tuple[Compiled, Callable[[], LiveProgram]]:
    """The program with its weights, and what makes the same steps with exact functions."""
    if not clamp and calibration is None:
        raise InputError("clamp=False needs calibration: text that shows how far scores spread")
    ranges = RangeCheck(field, fraction_bits, tolerances)
    ranges.doublings = _doublings(model, ids, calibration, ranges.form)
    spreads = _calibrated(model, calibration, ranges)
    part = _partition(model, ids, ranges if check_ranges else None)
    fold(part, ranges.doublings)
    defer_normalization(part)
    lowered = partial(
        lower,
        part,
        spreads={} if clamp else spreads,
        tolerances=tolerances,
        guards=ranges.form if guards else None,
        doublings=ranges.doublings,
    )
    live = lowered()
    ranges.raise_first(live.executed, live.weights, live.exponentials)
    if live.guards:
        texts = [] if calibration is None else [_checked_ids(model, batch) for batch in token_batches(calibration)]
        check = GuardCheck(live.guards)
        for text in [*texts, ids] if check_ranges else texts:
            _partition(model, text, check)
        check.raise_first()
    compiled = Compiled(compile_steps(live, protocol, field, fraction_bits), live.weights)
    return compiled, partial(lowered, exact=True)


def _rehearsed(
    compiled: Compiled,
    model: torch.nn.Module,
    ids: npt.NDArray[np.int64],
    tolerance: float,
    exact: Callable[[], LiveProgram],
    text: str,
) -> None:
    """Raise LoweringError if the program would give other logits for `ids` than `model` gives."""
    found: list[torch.Tensor] = []

    def keep(node: torch.fx.Node, domains: Any, args: Any, kwargs: Any, value: Any) -> None:
        if any(user.op == "output" for user in node.users):
            found.append(value)

    _partition(model, ids, keep)
    expected = found[0][:, -compiled.program.logits.shape[1] :].double().cpu().numpy()
    check_logits(compiled.program, compiled.weights, ids, expected, tolerance, exact, text)


def _text(model: torch.nn.Module, calibration: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Calibration text, cut or repeated to the shape of `ids`."""
    rows = [_checked_ids(model, batch).ravel() for batch in token_batches(calibration)]
    return np.resize(np.concatenate(rows), ids.shape)


def _random_text(model: torch.nn.Module, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Random tokens in the shape of `ids`, the same for everyone: none twice before all have come."""
    return np.resize(np.random.default_rng(0).permutation(_vocabulary(model, ids)), ids.shape)


def _vocabulary(model: torch.nn.Module, ids: npt.NDArray[np.int64]) -> int:
    return _declared(model)["vocab_size"] or vocabulary(_partition(model, np.zeros_like(ids), None))


def _doublings(model: torch.nn.Module, ids: npt.NDArray[np.int64], calibration: Any, form: Format) -> Doublings:
    """By which powers of two each norm's rows are multiplied, or the weights before them.

    They follow from the calibration text, or from random tokens of the shape of `ids`: never from `ids` themselves.
    """
    if not any(node.target in NORMS for node in _graph(model).nodes):
        return NO_DOUBLINGS
    if calibration is None:
        texts = random_tokens(_vocabulary(model, ids), (ids.shape[0], ids.shape[1]))
    else:
        texts = iter(token_batches(calibration))
    sample = NormSample()
    for text in texts:
        part = _partition(model, _checked_ids(model, text), sample)
    found = sample.doublings(form)
    return Doublings(found, frozenset(name for name in foldable(part) if found.get(name, 0) > 0))


def _partition(model: torch.nn.Module, ids: npt.NDArray[np.int64], ranges: Observer | None) -> Partition:
    """Evaluate the model in the clear, in this process, and sort its values by who may know them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        return partition(model, _graph(model), torch.from_numpy(ids).to(device), ranges)
    finally:
        model.train(was_training)


def _graph(model: torch.nn.Module) -> torch.fx.Graph:
    build: Any = model.logits_graph
    graph = build()
    assert isinstance(graph, torch.fx.Graph)
    return graph


def _with_graph(model: torch.nn.Module) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"private inference takes a torch.nn.Module, not {type(model).__name__}")
    if hasattr(model, "logits_graph"):
        return model
    transform: Any = importlib.import_module("aero_compile").transform
    captured = transform(model, "baseline")
    assert isinstance(captured, torch.nn.Module)
    return captured


def _optimized(model: torch.nn.Module, logits: str, optimize: bool) -> torch.nn.Module:
    """The model after the inference passes; one that has been through them must give the logits asked for."""
    if logits not in ("all", "last"):
        raise InputError(f"logits must be 'all' or 'last', not {logits!r}")
    given = getattr(model, "positions_kept", None)
    if given is not None:
        if given != logits:
            raise InputError(f"this model was optimized for logits={given!r}; ask for the same, not for {logits!r}")
        return model
    if not hasattr(model, "structure"):
        optimize = False
    if not optimize:
        if logits == "last":
            raise InputError("logits='last' is a rewrite of the model: leave optimize=True")
        return model
    rewrite: Any = importlib.import_module("aero_compile").optimize_for_inference
    rewritten = rewrite(model, logits=logits)
    assert isinstance(rewritten, torch.nn.Module)
    return rewritten


def _checked_ids(model: torch.nn.Module, input_ids: Any) -> npt.NDArray[np.int64]:
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
    known = _declared(model)
    if known["max_positions"] is not None and ids.shape[1] > known["max_positions"]:
        raise InputError(f"{ids.shape[1]} tokens are longer than the {known['max_positions']} positions of the model")
    if known["vocab_size"] is not None and (ids.min() < 0 or ids.max() >= known["vocab_size"]):
        wrong = ids.max() if ids.max() >= known["vocab_size"] else ids.min()
        raise InputError(f"token id {wrong} is outside the vocabulary of {known['vocab_size']} tokens")
    return np.ascontiguousarray(ids.astype(np.int64))


def _declared(model: torch.nn.Module) -> Mapping[str, int | None]:
    return {name: getattr(model, name, None) for name in ("vocab_size", "max_positions")}
