"""A party's side of a kernel: words arrive as they were sent, and are counted."""

from __future__ import annotations

import numpy as np
import pytest

from aero_compile.errors import PartyError
from tests.support.kernel_sides import Pair, side_of


def test_words_arrive_and_are_counted() -> None:
    pair, words = Pair(), np.array([[0, 1, 2**63], [2**64 - 1, 5, 6]], np.uint64)
    client, server = side_of(1, pair), side_of(0, pair)
    client.send(words.T)
    np.testing.assert_array_equal(server.receive((3, 2)), words.T)
    assert vars(client.exchanged) == {"send_bytes": 48, "recv_bytes": 0, "send_actions": 1, "recv_actions": 0}
    assert vars(server.exchanged) == {"send_bytes": 0, "recv_bytes": 48, "send_actions": 0, "recv_actions": 1}


def test_another_number_of_words_is_refused() -> None:
    pair = Pair()
    side_of(1, pair).send(np.zeros(5, np.uint64))
    with pytest.raises(PartyError, match="40 bytes for words of shape"):
        side_of(0, pair).receive((2, 3))
