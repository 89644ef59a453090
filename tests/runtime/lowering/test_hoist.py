"""A mask that a reshape keeps from its softmax is found all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aero_compile.errors import LoweringError
from tests.support.runtime_graphs import TokenRows, aten, expected, in_spu

pytest.importorskip("spu")

HIDDEN = torch.full((4, 4), -1e30).triu(1)


@pytest.mark.parametrize(
    "apart",
    [
        lambda scores: aten.reshape.default(scores, [4, 4, 4]),
        lambda scores: aten.reshape.default(aten.reshape.default(scores, [4, 4, 4]), [1, 4, 4, 4]),
    ],
)
def test_a_softmax_is_taken_before_the_reshape_behind_its_mask(apart: Any) -> None:
    """Scores of 2 sequences and 2 heads, masked, and made one batch before the softmax, as XGLM does."""

    def attend(x: Any, model: Any) -> Any:
        weights = aten.softmax.int(apart(aten.add.Tensor(x, model.hidden)), -1)
        return aten.matmul.default(weights, model.values)

    scores = 3 * torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    model = TokenRows(scores, attend, {"values": torch.linspace(-1, 1, 12).reshape(4, 3)}, {"hidden": HIDDEN})
    assert np.abs(in_spu(model, defer=True) - expected(model)).max() < 2e-3


def test_a_reshape_of_the_scores_themselves_is_left() -> None:
    """Rows that are cut into others are no rows of the softmax: its mask cannot be found."""

    def attend(x: Any, model: Any) -> Any:
        return aten.softmax.int(aten.reshape.default(aten.add.Tensor(x, model.hidden), [2, 2, 8, 2]), -1)

    model = TokenRows(torch.zeros(2, 2, 4, 4), attend, buffers={"hidden": HIDDEN})
    with pytest.raises(LoweringError, match="public table with huge"):
        in_spu(model, defer=True)
