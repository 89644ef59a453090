"""A tiny live model, compiled and exported, for the tests of the parties."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aero_compile.runtime import Compiled, compile_model, export
from tests.support.made_once import made_once
from tests.support.runtime_graphs import TokenRows, aten


def tiny_model(steps: int = 1) -> TokenRows:
    """Embedding of 64 tokens, a masked self-attention and a projection, `steps` times; 6 positions."""

    def body(x: Any, m: Any) -> Any:
        mask = torch.triu(torch.full((6, 6), -torch.inf), 1)
        for _ in range(steps):
            scores = aten.matmul.default(x, aten.transpose.int(x, -1, -2))
            weights = aten.softmax.int(aten.add.Tensor(scores, mask), -1)
            x = aten.linear.default(aten.matmul.default(weights, x), m.w, m.b)
        return aten.linear.default(x, m.table)

    generator = torch.Generator().manual_seed(5)
    parameters = {
        "w": torch.randn(8, 8, generator=generator) * (0.5 if steps == 1 else 0.25),  # many steps: no growth
        "b": torch.randn(8, generator=generator),
    }
    model = TokenRows(torch.randn(64, 8, generator=generator), body, parameters)
    model.shape = (1, 6, 8)
    return model


IDS = np.array([[3, 61, 7, 7, 40, 22]], dtype=np.int64)


def logits_of(model: TokenRows) -> npt.NDArray[np.float32]:
    """Evaluate the tiny model on `IDS` in PyTorch."""
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(IDS)).numpy(), dtype=np.float32)


@made_once
def tiny_compiled(protocol: str = "semi2k", steps: int = 1) -> Compiled:
    """The tiny model compiled for one sequence of 6 tokens."""
    return compile_model(tiny_model(steps), 1, 6, protocol)


@dataclass(frozen=True)
class Exported:
    """Files of the two parties, each in a folder of its own, as on two hosts."""

    compiled: Compiled
    server: Path
    client: Path


def exported(root: Path, protocol: str = "semi2k", steps: int = 1, **options: Any) -> Exported:
    """Compile the tiny model and write what each party needs."""
    compiled = compile_model(tiny_model(steps), 1, 6, protocol, **options)
    server, client = root / "server", root / "client"
    export(compiled, server)
    client.mkdir()
    compiled.program.save(client / "program.json")
    if compiled.published:
        shutil.copy(server / "public.npz", client / "public.npz")
    if (server / "lookup_table.bin").exists():
        (server / "lookup_table.bin").rename(client / "lookup_table.bin")
    np.save(client / "tokens.npy", IDS)
    return Exported(compiled, server, client)
