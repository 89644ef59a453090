"""The kernel of a lookup under encryption: what it gives, sends and bills, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aero_compile.errors import PartyError
from aero_compile.runtime.costs.building_blocks import Session
from aero_compile.runtime.costs.table import CostTable
from aero_compile.runtime.kernels.encrypted_lookup import EncryptedLookup, encrypted_table
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import run_both, side_of

KERNEL = EncryptedLookup(37, 9, 18)


def test_rows_come_out_in_shares_and_one_message_is_what_is_billed() -> None:
    draw = np.random.default_rng(1)
    table = draw.integers(-(2**43), 2**43, (37, 9)).view(np.uint64)
    ids = np.array([[36, 0, 5], [5, 5, 21]])
    tokens = np.eye(37, dtype=np.uint64)[ids]
    unread = np.zeros(0, np.uint64)
    shares = [np.zeros_like(tokens), unread], [tokens, unread]
    found, pair = run_both(KERNEL, shares, encrypted_table(table << np.uint64(18)))
    wanted = table[ids].ravel() << np.uint64(18)
    assert np.abs((found[SERVER][0] + found[CLIENT][0] - wanted).view(np.int64)).max() < 2**18
    np.testing.assert_array_equal(KERNEL.together(draw, tokens.ravel(), table.ravel())[0], wanted)
    assert KERNEL.results(tokens.shape, table.shape)[0].shape == (2, 3, 9)

    session = Session(CostTable.load())
    KERNEL.bill(session, tokens.shape, table.shape)
    spent = session.bill()
    assert pair.sent[SERVER] == []
    assert spent.server_bytes == 0
    assert (spent.client_bytes, spent.messages) == (sum(map(len, pair.sent[CLIENT])), len(pair.sent[CLIENT]))
    assert (spent.messages, spent.rounds) == (1, 0.5)
    assert spent.computing > 0


@pytest.mark.parametrize("wrong", [np.zeros((2, 37)), np.ones((2, 37)), np.eye(37)[[3, 3]] + np.eye(37)[[3, 4]]])
def test_what_is_no_one_hot_row_of_the_clients_is_refused(wrong: Any) -> None:
    with pytest.raises(PartyError, match="tokens that the client alone knows"):
        KERNEL.run(side_of(CLIENT, None), wrong.astype(np.uint64).ravel(), np.zeros(0, np.uint64))


@pytest.mark.parametrize(
    "shapes", [((3, 4), (37, 9)), ((3, 37), (9, 37)), ((3, 37),), ((3, 37), (37, 8)), ((), (37, 9))]
)
def test_other_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="EncryptedLookup takes"):
        KERNEL.results(*shapes)


def test_rows_beyond_the_highest_degree_are_refused() -> None:
    EncryptedLookup(37, 8192, 18).results((1, 37), (37, 8192))
    with pytest.raises(ValueError, match="at most 8192 numbers, not 8193"):
        EncryptedLookup(37, 8193, 18).results((1, 37), (37, 8193))


@pytest.mark.parametrize(
    "options", [(0, 1, 18), (7, 0, 18), (True, 1, 18), (7, 1.0, 18), (7, 1, 17), (7, 1, 29), (7, 1, 18.0)]
)
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="EncryptedLookup takes"):
        EncryptedLookup(*options).check()
