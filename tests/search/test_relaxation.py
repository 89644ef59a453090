"""Trained gates, on losses and prices that are written down."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aero_compile.search.choices.sites import Site, in_force
from aero_compile.search.orders import Problem, Relaxation, _saved

HEADS = [Site("heads", f"{layer}.{head}", layer, "heads", ("softmax", "none")) for layer in (0, 1) for head in (0, 1)]
LAYER = Site("layers", "0", 0, "heads", ("softmax", "uniform", "none"), (), 2)


def gated_of(sites: list[Site], losses: Tensor) -> Any:
    """A model whose loss is linear in the gates."""
    starts, total = {}, 0
    for site in sites:
        starts[site] = total
        total += len(site.options)
    return SimpleNamespace(starts=starts, total=total, loss_at=lambda gates, batch: torch.dot(gates, losses))


class Memory:
    """A state that keeps nothing."""

    def find(self, name: str) -> None:
        return None

    def put(self, name: str, value: Any) -> None:
        pass


@pytest.mark.parametrize("seed", range(20))
def test_gates_of_zero_and_one_save_what_the_decisions_in_force_save(seed: int) -> None:
    """A head of a layer that goes as a whole saves nothing besides."""
    pick, sites = random.Random(seed), [*HEADS, LAYER]
    gated = gated_of(sites, torch.zeros(0))
    decisions = {site: pick.choice(site.options) for site in sites}
    savings, gates = torch.zeros(gated.total), torch.zeros(gated.total)
    own: dict[tuple[Site, str], float] = {}
    for site in sites:
        for place, option in enumerate(site.options):
            own[site, option] = pick.random() if place else 0.0
            savings[gated.starts[site] + place] = own[site, option]
        gates[gated.starts[site] + site.options.index(decisions[site])] = 1.0
    expected = sum(own[site, option] for site, option in in_force(decisions).items())
    assert float(_saved(gated, gates, savings)) == pytest.approx(expected, abs=1e-6)


def test_what_loses_least_goes_first() -> None:
    losses = torch.tensor([each for loss in (0.4, 0.1, 0.3, 0.2) for each in (0.0, loss)])
    gated: Any = gated_of(HEADS, losses)
    problem = Problem(HEADS, lambda decided: 10.0 - len(decided), lambda decided: 0.0)
    relaxation = Relaxation(60, [torch.zeros(1, 2)], target=8.0)
    path = list(relaxation.order(problem, gated, Memory(), lambda: None))  # type: ignore[arg-type]
    assert [site.name for site in path[-1]] == ["0.1", "1.1", "1.0", "0.0"]
