"""Bit products for the truncations of the steps that are computed on shares (`aero_compile.runtime.online`).

Each party draws a bit m_i for every element. Together they are XOR shares of a bit, which SPU turns into shares of the
number m_0 + m_1 - 2·m_0·m_1 in its 32-bit ring (4 bytes and a bit an element in Cheetah); less the own bits, these are
shares of 2·m_0·m_1. All truncations of a program, of several runs, are made together.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from aero_compile.runtime.offline.groups import Group, grouped
from aero_compile.runtime.online.truncation import BitProducts, bit_products
from aero_compile.runtime.program_parts import ProgramContent

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side

MOST = 2**22
"""Bit products that SPU makes at once: it takes about 100 MB for so many."""

SET_UP = 2**16
"""So many occupy every worker of SPU's tiled protocols, each of which sets its oblivious transfers up."""

NAME = "bit products"
"""Of what is kept for a step."""

_CODE = """module @bits attributes {{pphlo.version = "{version}"}} {{
  func.func @main(%arg0: tensor<{n}x!pphlo.secret<i1>>) -> {result} {{
    %0 = pphlo.constant dense<1> : tensor<{n}xi32>
    %1 = pphlo.constant dense<0> : tensor<{n}xi32>
    %2 = pphlo.select %arg0, %0, %1 : (tensor<{n}x!pphlo.secret<i1>>, tensor<{n}xi32>, tensor<{n}xi32>) -> {result}
    return %2 : {result}
  }}
}}
"""


def bit_groups(program: ProgramContent, runs: int = 1) -> list[Group]:
    """Group the steps of a program that take bit products, for so many runs."""
    return grouped(((at, runs * count) for at, count in program.truncated.items()), MOST)


def make_bit_products(side: Side, count: int) -> BitProducts:
    """Make so many bit products as one party, as many as SPU has memory for."""
    own = np.unpackbits(np.frombuffer(os.urandom(-(-count // 8)), np.uint8), count=count)
    result = f"tensor<{count}x!pphlo.secret<i32>>"
    code = _CODE.format(n=count, version=side.spu.__version__, result=result)
    numbers = side.run_small(code, own.astype(np.uint64), takes_bits=True)
    return bit_products(own.astype(np.bool_), (own - numbers).astype(np.uint32))


def bill_bit_products(session: Session, count: int) -> None:
    """Bill the making of so many."""
    session.step(len(_CODE))
    session.transfer("b2a32", count, second=True)
