"""What is prepared before the tokens are known, by the cost model: against a measured run, and by its own rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aero_compile.runtime import private_inference
from aero_compile.runtime.costs.model import estimate
from aero_compile.runtime.hosts.measure import OFFLINE
from tests.support.runtime_tiny import IDS, logits_of, tiny_model

pytest.importorskip("spu")


def test_against_a_measured_run() -> None:
    """Both phases, operator by operator: bytes within 0.5 %, messages exactly.

    A truncation of few numbers is billed up to 30 bytes each, of which there are 500 in all here.
    """
    model = tiny_model()
    logits, bill = private_inference(model, torch.from_numpy(IDS), offline=True)
    np.testing.assert_allclose(logits, logits_of(model), rtol=0, atol=5e-3)
    found = estimate(model, IDS.shape[1], offline=True)
    assert found.bytes == pytest.approx(bill.bytes, rel=5e-3, abs=500)
    assert found.offline_bytes == pytest.approx(bill.offline_bytes, rel=5e-3)
    assert (found.messages, found.offline_messages) == (bill.messages, bill.offline_messages)
    measured = {row["op"]: row for row in bill.per_op}
    for row in found.per_op:
        for column in ("bytes", "offline_bytes"):
            assert row[column] == pytest.approx(measured[row["op"]][column], rel=0.02, abs=500), (row["op"], column)
        assert row["offline_messages"] == measured[row["op"]]["offline_messages"]
    for each in (found, bill):
        assert sum(row["offline_bytes"] for row in each.per_op) == each.offline_bytes
        assert sum(row["offline_messages"] for row in each.per_step) == each.offline_messages
        assert str(each).count("offline") == 2
    assert bill.offline_seconds > 0


def test_products_move_before_and_the_rest_stays() -> None:
    model = tiny_model()
    plain, split = (estimate(model, 6, offline=offline, lookup="one-hot") for offline in (False, True))
    assert (plain.offline_bytes, plain.offline_messages, plain.offline_seconds) == (0, 0, 0)
    assert "offline" not in str(plain)
    before, after = ({row["op"]: row for row in each.per_op} for each in (plain, split))
    assert after["softmax"]["bytes"] <= before["softmax"]["bytes"]
    for name in ("embedding", "linear", "matmul"):
        assert after[name]["bytes"] < before[name]["bytes"] / 20
        assert after[name]["offline_bytes"] > before[name]["bytes"] / 2
    assert all(row[column] == 0 for row in split.per_op if row["op"] == "reveal" for column in OFFLINE)


def test_a_product_sends_eight_bytes_a_value() -> None:
    """Besides a truncation for each entry of the result, of at most 30 bytes where there are so few."""
    rows = {row["op"]: row for row in estimate(tiny_model(), 6, offline=True, lookup="one-hot").per_op}
    tokens, width, results = math.prod((6, 64)), 6 * 8, 6 * 8
    assert 8 * tokens < rows["embedding"]["bytes"] < 8 * tokens + 30 * results
    assert 8 * 2 * width < rows["linear"]["bytes"] < 8 * 2 * width + 30 * (results + tokens)
