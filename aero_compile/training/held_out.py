"""What is measured on held-out blocks: loss and headwise entropies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def mean_loss(model: Any, blocks: Any, size: int, device: Any, most: int = 64) -> float:
    """Mean cross entropy (nats a token) on the first `most` blocks, `size` at a time, without drawing random numbers.

    `model`: an EntropyRegularizedModel, wrapped or not, left in train mode.
    """
    count, total = min(most, len(blocks)), 0.0
    model.eval()
    with torch.no_grad():
        for ids in batches(blocks, count, size):
            total += float(model(input_ids=ids.to(device), labels=ids.to(device))["loss"]) * len(ids)
    model.train()
    return total / count


def headwise_entropies(
    model: Any, blocks: Any, size: int, device: Any, most: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Headwise entropies `[L][H]` in eval mode, over the first `most` blocks: in nats, and as shares of rows' maxima.

    The latter are means over rows i > 0 of E_i / log(i + 1). The model keeps its mode.
    """
    training, count = model.training, min(most, len(blocks))
    model.eval()
    sums: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for ids in batches(blocks, count, size):
            out = model(input_ids=ids.to(device), output_entropies=True)
            for number, name in enumerate(("entropies", "row_shares")):
                rows = [layer.double() * len(ids) for layer in out[name]]
                before = sums[number]
                sums[number] = [a + b for a, b in zip(before, rows, strict=True)] if before else rows
    model.train(training)
    nats, shares = ([(row / count).tolist() for row in table] for table in sums)
    return nats, shares


def headwise_spreads(model: Any, blocks: Any, size: int, device: Any, most: int) -> list[list[float]]:
    """Largest spread of scores of each head `[L][H]` in eval mode, over the first `most` blocks; the mode is kept."""
    training, count = model.training, min(most, len(blocks))
    model.eval()
    largest: list[Tensor] = []
    with torch.no_grad():
        for ids in batches(blocks, count, size):
            found = model(input_ids=ids.to(device), output_spreads=True)["spreads"]
            largest = list(map(torch.maximum, largest, found)) if largest else found
    model.train(training)
    return [layer.tolist() for layer in largest]


def batches(blocks: Any, count: int, size: int) -> Iterator[Tensor]:
    """Token ids `[B, T]` of the first `count` blocks, at most `size` together."""
    for start in range(0, count, size):
        yield torch.stack([blocks[i]["input_ids"] for i in range(start, min(start + size, count))])
