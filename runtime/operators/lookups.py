"""Lookups of the client's tokens in a table of the server, which is encrypted once for all runs."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.ring import fraction_bits
from aero_compile.runtime.arithmetic.truncation import truncated
from aero_compile.runtime.kernels.calls import call_kernel
from aero_compile.runtime.kernels.encrypted_lookup import LEAST_BITS, EncryptedLookup


def embed(ids: Any, table: Any) -> Any:
    """Look rows of `table` [V, d] up by one-hot `ids` [..., V]."""
    vocabulary, width = table.shape
    (found,) = call_kernel(EncryptedLookup(vocabulary, width, fraction_bits() or LEAST_BITS), ids, table)
    return truncated(found)
