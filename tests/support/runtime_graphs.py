"""Small live graphs, plain and on SPU, for the runtime's tests."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from aero_compile.errors import OutOfRangeError
from aero_compile.runtime.hosts.opening import check_guard
from aero_compile.runtime.lowering.defer import defer_normalization
from aero_compile.runtime.lowering.partition import partition
from aero_compile.runtime.lowering.to_jax import lower
from aero_compile.runtime.program import CLIENT, SERVER, Program, one_hot
from aero_compile.runtime.spu_config import runtime_config

aten = torch.ops.aten
Body = Callable[..., Any]


@contextlib.contextmanager
def any_table_public() -> Iterator[None]:
    """Take every table but parameters for structure, so that random masks can be tried."""

    def tables(module: torch.nn.Module, graph: fx.Graph) -> frozenset[str]:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return frozenset(str(n.target) for n in graph.nodes if n.op == "get_attr" and n.target not in parameters)

    with mock.patch("aero_compile.runtime.lowering.partition.structural_attributes", tables):
        yield


class TokenRows(torch.nn.Module):
    """``function(x, self)`` where x, shaped like ``values``, is looked up by the tokens row by row."""

    def __init__(
        self,
        values: torch.Tensor,
        function: Body,
        parameters: Mapping[str, torch.Tensor] | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(values.detach().reshape(-1, values.shape[-1]).clone())
        self.shape = tuple(values.shape)
        self._function = function
        for name, tensor in (parameters or {}).items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        self.vocab_size = self.table.shape[0]
        self.max_positions: int | None = None

    def forward(self, input_ids: Any) -> Any:
        rows = aten.embedding.default(self.table, input_ids)
        return self._function(aten.view.default(rows, list(self.shape)), self)

    def logits_graph(self) -> fx.Graph:
        return fx.symbolic_trace(self).graph

    @property
    def ids(self) -> torch.Tensor:
        """The tokens, int64 [1, rows], for which x equals the given values."""
        return torch.arange(self.vocab_size)[None]


def in_jax(model: TokenRows, *, exact: bool = True) -> npt.NDArray[np.float64]:
    """Lower ``model`` and evaluate it in plain JAX with float64."""
    import jax

    with jax.experimental.enable_x64():  # type: ignore[no-untyped-call, unused-ignore]
        part = partition(model, model.logits_graph(), model.ids)
        live = lower(part, exact=exact, dtype=np.float64)
        tokens = one_hot(model.ids.numpy(), live.token_shape[2]).astype(np.float64)
        return np.asarray(live.run(tokens), dtype=np.float64)


def in_spu(model: TokenRows, protocol: str = "semi2k", *, defer: bool = False) -> npt.NDArray[np.float64]:
    """Lower ``model``, compile it, and run both parties as threads of this process."""
    from aero_compile.runtime.lowering.spu_compile import compile_steps

    part = partition(model, model.logits_graph(), model.ids)
    if defer:
        defer_normalization(part)
    live = lower(part)
    program = compile_steps(live, protocol, 64, 18)
    tokens = one_hot(model.ids.numpy(), live.token_shape[2])
    return simulate(program, {program.tokens.name: tokens}, live.weights)


def simulate(
    program: Program, tokens: Mapping[str, npt.NDArray[Any]], weights: Mapping[str, npt.NDArray[Any]]
) -> npt.NDArray[np.float64]:
    """Run a program between two threads and return the opened result.

    Raises:
        OutOfRangeError: the private checks of the program found a value outside.
    """
    import spu

    config = runtime_config(program.protocol, program.field, program.fraction_bits)
    config.enable_pphlo_profile = False
    io = spu.Io(2, config)
    shares = {
        name: io.make_shares(array, spu.Visibility.VIS_SECRET, owner)
        for owner, arrays in ((SERVER, weights), (CLIENT, tokens))
        for name, array in arrays.items()
    }
    desc = spu.link.Desc()
    desc.id = uuid.uuid4().hex  # links of the same name are the same link, with what an earlier run left in it
    for rank in (SERVER, CLIENT):
        desc.add_party(f"party{rank}", f"thread{rank}")
    results: dict[int, Any] = {}
    refused: list[OutOfRangeError] = []

    def party(rank: int) -> None:
        link = spu.link.create_mem(desc, rank)
        runtime = spu.Runtime(link, config)
        for name, pieces in shares.items():
            runtime.set_var(name, pieces[rank])
        for step in program.steps:
            code = program.codes[step.code].encode()
            runtime.run(spu.Executable(step.label, list(step.inputs), list(step.outputs), code))
        if program.guard is not None:
            try:
                check_guard(link, runtime.get_var(program.guard), io, rank)
            except OutOfRangeError as error:
                refused.append(error)
        results[rank] = runtime.get_var(program.logits.name)

    threads = [threading.Thread(target=party, args=(rank,)) for rank in (SERVER, CLIENT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if refused:
        assert len(refused) == 2, "one party alone found a value outside"
        raise refused[0]
    return np.asarray(io.reconstruct([results[SERVER], results[CLIENT]]), dtype=np.float64)


def expected(model: TokenRows) -> npt.NDArray[np.float64]:
    """Evaluate the model in PyTorch."""
    with torch.no_grad():
        result = model(model.ids)
    assert isinstance(result, torch.Tensor)
    return result.double().numpy()
