"""Products of random words, element by element, as kernels take them: made for all kernels of a program at once.

SPU multiplies elements in ciphertexts of 8192 values, of which a call fills whole ones. So the parties concatenate the
factors of all kernels and multiply them together (`aero_compile.runtime.offline.batches`). Two shares of a product of
two shares need two ciphertexts and an answer (221 bytes an element); where each party knows one factor alone, one
ciphertext and an answer (143). The square of a mask a = a_0 + a_1 is of the second kind: a² = a_0² + a_1² + 2·a_0·a_1,
of which each party knows one of the first two terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aero_compile.runtime.kernels.kernel import RandomWords
from aero_compile.runtime.kernels.words import Words

Factors = Callable[[Mapping[str, Words]], tuple[Words, ...]]


@dataclass(frozen=True)
class ElementTriples:
    """What a kernel takes of the products of random words before its arguments are known, under the name "product".

    `factors`: from a party's random words by name its words of the factors, uint64 [size] each. `crossed`: there is one
    of each party, which the other does not know; else shares of both factors.
    """

    randoms: tuple[RandomWords, ...]
    size: int
    crossed: bool
    factors: Factors
