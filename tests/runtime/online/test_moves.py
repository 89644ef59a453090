"""Moves of elements as they are printed: any order of dimensions, and forms that are left to SPU."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from aero_compile.runtime.costs.pphlo import Operation, parse
from aero_compile.runtime.online.moves import move
from aero_compile.runtime.online.plan import plan_of


def _kind(shape: tuple[int, ...]) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}!pphlo.secret<f32>>"


def _code(text: str, takes: tuple[int, ...], gives: tuple[int, ...]) -> str:
    return (
        f"func.func @main(%arg0: {_kind(takes)}) -> {_kind(gives)} {{\n"
        f"%0 = pphlo.{text} : ({_kind(takes)}) -> {_kind(gives)}\n"
        f"return %0 : {_kind(gives)}\n"
    )


def _operation(text: str, takes: tuple[int, ...], gives: tuple[int, ...]) -> Operation:
    (found,) = parse(_code(text, takes, gives)).operations
    return found


@pytest.mark.parametrize("dims", list(permutations(range(4), 2)), ids=str)
def test_a_broadcast_puts_each_dimension_where_it_says(dims: tuple[int, int]) -> None:
    """Element [a, b] is at every place whose index has a in the first of `dims` and b in the second."""
    value = np.arange(6).reshape(2, 3)
    shape = [4, 5, 6, 7]
    for at, size in zip(dims, value.shape, strict=True):
        shape[at] = size
    found = move(_operation(f"broadcast %arg0, dims = {list(dims)}", (2, 3), tuple(shape)), [value])
    indices = np.indices(shape)
    np.testing.assert_array_equal(found, value[indices[dims[0]], indices[dims[1]]])


@pytest.mark.parametrize("dims", list(permutations(range(3))), ids=str)
def test_a_transpose_takes_its_dimensions_in_order(dims: tuple[int, ...]) -> None:
    value = np.arange(24).reshape(2, 3, 4)
    shape = tuple(value.shape[at] for at in dims)
    found = move(_operation(f"transpose %arg0, dims = {list(dims)}", value.shape, shape), [value])
    np.testing.assert_array_equal(found, value.transpose(dims))


def test_elements_that_a_negative_padding_cuts_off_are_left_to_spu() -> None:
    code = (
        "func.func @main(%arg0: tensor<4x!pphlo.secret<f32>>, %arg1: tensor<!pphlo.secret<f32>>) -> "
        "tensor<3x!pphlo.secret<f32>> {\n"
        "%0 = pphlo.pad %arg0, %arg1, low = [-1], high = [0], interior = [0] : (tensor<4x!pphlo.secret<f32>>, "
        "tensor<!pphlo.secret<f32>>) -> tensor<3x!pphlo.secret<f32>>\n"
        "return %0 : tensor<3x!pphlo.secret<f32>>\n"
    )
    assert plan_of(code, 18) is None
    assert plan_of(code.replace("[-1]", "[0]").replace("<3x", "<4x"), 18) is not None


def test_one_bit_for_a_whole_array_is_left_to_spu() -> None:
    code = (
        "func.func @main(%arg0: tensor<!pphlo.secret<i1>>, %arg1: tensor<3x!pphlo.secret<f32>>) -> "
        "tensor<3x!pphlo.secret<f32>> {\n"
        "%0 = pphlo.select %arg0, %arg1, %arg1 : (tensor<!pphlo.secret<i1>>, tensor<3x!pphlo.secret<f32>>, "
        "tensor<3x!pphlo.secret<f32>>) -> tensor<3x!pphlo.secret<f32>>\n"
        "return %0 : tensor<3x!pphlo.secret<f32>>\n"
    )
    assert plan_of(code, 18) is None
    assert plan_of(code.replace("tensor<!pphlo.secret<i1>>", "tensor<3x!pphlo.secret<i1>>"), 18) is not None
