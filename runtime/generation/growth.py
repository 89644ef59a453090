"""A cache that grows, or shrinks: each party its own share of it, and nothing is sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.kernels.run import SHARED
from aero_compile.runtime.kernels.words import Words, read_words, with_words
from aero_compile.runtime.program_parts import TensorSpec


def grow(spu: Any, io: Any, runtime: Any, rank: int, held: TensorSpec, wanted: TensorSpec, ring: int) -> None:
    """Give the cached value `held` of SPU's `runtime` the shape of `wanted`; positions that are new hold zeros.

    `ring`: its bits.
    """
    words = resized(read_words(runtime.get_var(held.name), ring), held.shape, wanted.shape)
    zeros = np.zeros(wanted.shape, wanted.dtype)
    form = io.make_shares(zeros, spu.Visibility.VIS_SECRET, SHARED)[rank]
    runtime.set_var(wanted.name, with_words(form, words, ring))


def resized(words: Words, held: tuple[int, ...], wanted: tuple[int, ...]) -> Words:
    """The words of a share [held] cut, or filled up with zeros, to the shape `wanted`, uint64 [elements].

    Zeros at both parties are shares of zero.
    """
    kept = tuple(slice(min(pair)) for pair in zip(held, wanted, strict=True))
    found = np.zeros(wanted, np.uint64)
    found[kept] = words.reshape(held)[kept]
    return found.ravel()
