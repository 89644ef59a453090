"""Programs in which a party would show the other what it multiplies with are refused by both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aero_compile.errors import InputError
from aero_compile.runtime import compile_model, evaluated
from aero_compile.runtime.arithmetic.ciphertexts import Dims
from aero_compile.runtime.arithmetic.evaluators import Evaluation, Owner, evaluations
from aero_compile.runtime.evaluated import check_products
from aero_compile.runtime.program import Program
from aero_compile.runtime.program_parts import TOKENS, Step, TensorSpec
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.runtime_tiny import tiny_model
from tests.support.wire import code_of

pytest.importorskip("spu")


def _program(function: Any, weights: tuple[int, ...], tokens: tuple[int, ...], protocol: str = "cheetah") -> Program:
    """A program of one step, as a server may write it: `function` of its weights and of the client's one-hot rows."""
    arrays = np.zeros(weights, np.float32), np.zeros(tokens, np.int32)
    code = code_of(function, *arrays)
    shape = tuple(int(size) for size in code.rsplit("-> tensor<", 1)[1].split("!")[0].rstrip("x").split("x"))
    return Program(
        *(protocol, 64, 18, (TensorSpec("in0", weights, "float32"),), TensorSpec(TOKENS, tokens, "int32")),
        *(TensorSpec("out0", shape, "float32"), (Step("product", "here", "p", ("in0", TOKENS), ("out0",), ()),)),
        *({"p": code}, {}),
    )


def _looked_up(table: Any, tokens: Any) -> Any:
    return tokens[0] @ table


@pytest.mark.parametrize(
    ("length", "vocabulary", "width", "is_taken"),
    [(256, 512, 128, False), (512, 300, 40, False), (64, 512, 128, True), (1, 900, 900, True), (20, 50, 8, True)],
)
def test_the_client_never_multiplies_with_its_own_tokens(
    length: int, vocabulary: int, width: int, is_taken: bool
) -> None:
    """Where SPU would let it, by the shapes alone, and with more than one answer."""
    program = _program(_looked_up, (vocabulary, width), (1, length, vocabulary))
    if is_taken:
        check_products(program)
        return
    with pytest.raises(InputError, match=r"step 0 .* the client would multiply its own input with ciphertexts"):
        check_products(program)
    check_products(replace(program, protocol="semi2k"))


HIDING = {
    "moved": lambda table, tokens: tokens[0][::-1].T.T @ table,
    "in halves": lambda table, tokens: (tokens[0] * 0.5) @ table,
    "with more rows": lambda table, tokens: (tokens[0] + np.eye(256, 512, dtype=np.float32)) @ table,
    "from the other side": lambda table, tokens: (table.T @ tokens[0].T).T,
    "as a share of both": lambda table, tokens: (tokens[0] + table[:256, :1]) @ table,
    "a batch of one": lambda table, tokens: (tokens.astype(np.float32) @ table[None])[0],
}


@pytest.mark.parametrize("name", HIDING)
def test_however_it_is_written(name: str) -> None:
    with pytest.raises(InputError, match=r"would multiply its (own input|share) with ciphertexts"):
        check_products(_program(HIDING[name], (512, 128), (1, 256, 512)))


def test_shares_have_one_answer_for_each_product() -> None:
    def scores(table: Any, tokens: Any) -> Any:
        x = (tokens[0][:8] @ table)[0] * table[:128, :64]
        return x @ x.T

    with pytest.raises(InputError, match="would multiply its share with ciphertexts and send 2 answers"):
        check_products(_program(scores, (512, 64), (1, 8, 512)))


def test_other_rings_are_refused_in_cheetah() -> None:
    with pytest.raises(InputError, match="compile it with field=64"):
        compile_model(tiny_model(), 1, 6, field=128)
    compile_model(tiny_model(), 1, 6, "semi2k", field=128)


def test_what_is_prepared_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random words of the client meet weights of the server, and random shares each other."""
    program = compile_model(tiny_model(), 1, 6, offline=True).program
    seen = set[tuple[Owner, Owner]]()

    def watched(dims: Dims, left: Owner, right: Owner) -> Iterator[Evaluation]:
        seen.add((left, right))
        return evaluations(dims, left, right)

    monkeypatch.setattr(evaluated, "evaluations", watched)
    check_products(program)
    assert seen >= {(CLIENT, SERVER), (None, None)}
