"""Products in two phases: their secret work is done before the tokens are known."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.ring import truncated
from aero_compile.runtime.arithmetic.row_scaling import by_rows
from aero_compile.runtime.arithmetic.two_phases import scales_by_matrices
from aero_compile.runtime.kernels.cached_product import CachedProduct
from aero_compile.runtime.kernels.kernel import call_kernel
from aero_compile.runtime.kernels.prepared_scaling import PreparedScaling
from aero_compile.runtime.kernels.triples import PreparedProduct, TripleProduct


def embed(ids: Any, table: Any) -> Any:
    """Look rows of `table` [V, d] up by one-hot `ids` [..., V]."""
    return _product(ids.astype(table.dtype), table, transposed=False)


def linear(input: Any, weight: Any, bias: Any = None, **_: Any) -> Any:
    """[..., inner] times `weight` [columns, inner], and the bias."""
    found = _product(input, weight, transposed=True)
    return found if bias is None else found + bias


def matmul(x: Any, other: Any, **_: Any) -> Any:
    """[..., inner] × [inner, columns]."""
    return _product(x, other, transposed=False)


def scaling(x: Any, other: Any, **_: Any) -> Any:
    """x · `other`, which the server knows and which broadcasts to x; it is an input of the program as it is."""

    def product(rows: Any, numbers: Any) -> Any:
        kernel = PreparedScaling(rows.shape[1], scales_by_matrices(rows.shape[0], rows.shape[1], owned=True))
        return truncated(call_kernel(kernel, rows, other)[0])

    return by_rows(x, other, product)


def product(x: Any, other: Any, **_: Any) -> Any:
    """[..., rows, inner] × [..., inner, columns] of equal leading sizes, both secret."""
    (found,) = call_kernel(TripleProduct(x.shape[-2], x.shape[-1], other.shape[-1]), x, other)
    return truncated(found)


def cached_product(x: Any, other: Any, *, site: str, keys: bool, repeats: int, spare: int, **_: Any) -> Any:
    """[..., rows, inner] × [..., inner, columns] of equal leading sizes, of which the second are cached rows.

    `site`, `keys`, `repeats`, `spare`: as of `CachedProduct`.
    """
    sizes = (x.shape[-2], x.shape[-1], other.shape[-1])
    (found,) = call_kernel(CachedProduct(site, keys, repeats, spare, *sizes), x, other)
    return truncated(found)


def _product(x: Any, weight: Any, transposed: bool) -> Any:
    (found,) = call_kernel(PreparedProduct(x.shape[-1], transposed), x, weight)
    return truncated(found)
