"""Products whose secret work is done before the tokens are known."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.truncation import truncated
from aero_compile.runtime.kernels.calls import call_kernel
from aero_compile.runtime.kernels.triple_elements import TripleElements


def product_of_owned(servers: Any, clients: Any) -> Any:
    """`servers` times `clients`, two JAX arrays of one shape that only the server and only the client know."""
    (found,) = call_kernel(TripleElements(True), servers[..., None], clients)
    return truncated(found.reshape(clients.shape))


def product_of_rows(x: Any, numbers: Any) -> Any:
    """Rows of x [R, w] times `numbers` [R], both secret."""
    (found,) = call_kernel(TripleElements(False, x.shape[1]), x, numbers)
    return truncated(found)
