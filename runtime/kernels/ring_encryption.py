"""Encryption by ring learning with errors: polynomials of words, modulo X^N + 1 and 2^64.

The secret s is ternary. A ciphertext of a polynomial m is a pair (a, b) with b = m + e - a·s: a is uniform, and e is a
binomial error. b + a·s = m + e. The parts a are hashed from a seed, so that only b is kept. From the public key, a pair
(a', b') of 0, anybody makes other ciphertexts of 0 by a ternary u and an error e': (a'·u + e', b'·u).

Modulo 2^64 the standard for homomorphic encryption (https://homomorphicencryption.org/standard) asks for N of 4,096 at
192 bits of security, with such secrets: there q may have 75 bits, at 128 bits of security 109.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.kernels.words import Words

Small = npt.NDArray[np.int64]
"""Coefficients of small polynomials: secrets and errors."""

Draw = Callable[[int], bytes]
"""What draws so many random bytes: `os.urandom`, but for tests."""

LEAST_DEGREE, LARGEST_DEGREE = 4096, 8192
"""Below, the security ends; above, a product by `times` may be wrong."""

ERROR_BYTES = 3
"""An error is the ones among so many random bytes, less those among as many others: a deviation of 3.5."""

LARGEST_ERROR = 8 * ERROR_BYTES

SEED_WORDS = 4
"""Of the seed from which the parts a are hashed."""

_ONES = np.array([number.bit_count() for number in range(256)], np.int64)


def uniform(draw: Draw, *shape: int) -> Words:
    """Words that are drawn uniformly."""
    return np.frombuffer(draw(8 * int(np.prod(shape))), "<u8").astype(np.uint64).reshape(shape)


def ternary(draw: Draw, *shape: int) -> Small:
    """Numbers -1, 0 and 1, each as likely as the others."""
    return (uniform(draw, *shape) % np.uint64(3)).astype(np.int64) - 1


def errors(draw: Draw, *shape: int) -> Small:
    """Numbers of a binomial distribution around 0, at most `LARGEST_ERROR` in magnitude."""
    ones = _ONES[np.frombuffer(draw(2 * ERROR_BYTES * int(np.prod(shape))), np.uint8)]
    first, second = ones.reshape(2, *shape, ERROR_BYTES).sum(axis=-1)
    return np.asarray(first - second)


def hashed(seed: Words, number: int, degree: int) -> Words:
    """The part a of the ciphertext with this number."""
    content = seed.astype("<u8").tobytes() + number.to_bytes(8, "little")
    return np.frombuffer(hashlib.shake_128(content).digest(8 * degree), "<u8").astype(np.uint64)


def times(a: Words, small: Small) -> Words:
    """The products modulo X^N + 1 and 2^64 of words [..., N] and ternary polynomials [..., N].

    They are made of two products of halves of the words, in float64. Each is a sum of N numbers below 2^31, and off by
    less than N · 2^31 · 2^-53 · 8 log2(N), the rounding of three Fourier transforms, which is below 1/4: rounded, it is
    exact.
    """
    low = a.astype(np.uint32).view(np.int32)
    high = (a - low.astype(np.uint64) >> np.uint64(32)).astype(np.uint32).view(np.int32)
    factor = _values(small)
    return _coefficients(_values(low) * factor) + (_coefficients(_values(high) * factor) << np.uint64(32))


def products(polynomials: npt.NDArray[Any], small: Small) -> npt.NDArray[np.int64]:
    """The products modulo X^N + 1 of whole numbers [..., N] of at most 2^31 and ternary polynomials [..., N], exact as
    those of `times`."""
    return _coefficients(_values(polynomials) * _values(small)).view(np.int64)


def _values(polynomial: npt.NDArray[Any]) -> npt.NDArray[np.complex128]:
    """Its values at half of the roots of X^N + 1, N/2 in number; the others are their conjugates."""
    half = polynomial.shape[-1] // 2
    return np.fft.fft((polynomial[..., :half] + 1j * polynomial[..., half:]) * _twist(half))


def _coefficients(values: npt.NDArray[np.complex128]) -> Words:
    """The whole numbers, as words, of which these are the values."""
    found = np.fft.ifft(values) * _twist(values.shape[-1]).conj()
    whole: Words = np.rint(np.concatenate([found.real, found.imag], axis=-1)).astype(np.int64).view(np.uint64)
    return whole


@lru_cache(maxsize=4)
def _twist(half: int) -> npt.NDArray[np.complex128]:
    """Powers of a root of i of the order `half`: X^half = i becomes Y^half = 1, which a Fourier transform computes."""
    return np.asarray(np.exp(1j * np.pi * np.arange(half) / (2 * half)))
