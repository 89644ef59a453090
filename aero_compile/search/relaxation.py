"""Weights of all alternatives, trained together by the loss's gradient under a price: an order of what goes first.

Every site is a sum of its options, weighed by a softmax of learned numbers; the model's own weights stay. What is
minimized is the loss plus a multiplier of how far the expected price is above the target; the multiplier grows as long
as it is (dual ascent). A falling temperature of the softmax drives the weights to zero and one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aero_compile.search.costs import is_number
from aero_compile.search.gated_model import GatedModel
from aero_compile.search.orders import Problem, in_order
from aero_compile.search.sites import Decisions
from aero_compile.search.state import State

_RATE = 0.1
_START = 2.0
"""What the learned number of a site's present option starts with; the others start with zero."""
_COLDEST = 0.2
"""Temperature of the softmax at the last step; 1 at the first."""


@dataclass(frozen=True)
class Relaxation:
    """How the weights are trained: for so many steps, each on one of `batches`, down to `target` of the price."""

    steps: int
    batches: Sequence[Tensor]
    target: float

    def order(self, problem: Problem, gated: GatedModel, state: State, tick: Callable[[], None]) -> Iterator[Decisions]:
        """Sites whose present option has the least weight first, each replaced by the option of the most."""
        numbers = self._train(problem, gated, state, tick)
        kept = {}
        for site in problem.sites:
            weights = torch.softmax(numbers[gated.starts[site] :][: len(site.options)], 0)
            kept[site] = (float(weights[0]), site.options[1 + int(weights[1:].argmax())])
        ranked = sorted(problem.sites, key=lambda site: (kept[site][0], str(site)))
        yield from in_order(problem, [{site: kept[site][1]} for site in ranked])

    def _train(self, problem: Problem, gated: GatedModel, state: State, tick: Callable[[], None]) -> Tensor:
        sites = [(str(site), site.options) for site in problem.sites]
        texts = [batch.tolist() for batch in self.batches]
        digest = hashlib.blake2b(repr((sites, texts)).encode(), digest_size=8).hexdigest()
        name = f"relaxation {self.steps} {self.target:.6g} {digest}"
        savings, scale = self._savings(problem, gated)
        numbers = torch.zeros(gated.total)
        numbers[list(gated.starts.values())] = _START
        first, second, multiplier = torch.zeros_like(numbers), torch.zeros_like(numbers), 0.0
        begin = 0
        saved = state.find(name)
        if saved is not None:
            if len(saved["numbers"]) != gated.total:
                raise state.damaged(name)
            begin, multiplier = int(saved["step"]), float(saved["multiplier"])
            numbers, first, second = (torch.tensor(saved[key]) for key in ("numbers", "first", "second"))
        for step in range(begin, self.steps):
            tick()
            numbers.requires_grad_(True)
            temperature = _COLDEST ** (step / max(1, self.steps - 1))
            gates = self._weights(gated, numbers / temperature)
            over = (problem.price({}) - _saved(gated, gates, savings) - self.target) / scale
            loss = gated.loss_at(gates, self.batches[step % len(self.batches)]) + multiplier * over
            (gradient,) = torch.autograd.grad(loss, numbers)
            multiplier = max(0.0, multiplier + _RATE * float(over.detach()))
            with torch.no_grad():  # Adam (Kingma & Ba 2015), in the open so that a stopped search goes on exactly
                first = 0.9 * first + 0.1 * gradient
                second = 0.99 * second + 0.01 * gradient.square()
                mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.99 ** (step + 1))
                numbers = numbers.detach() - _RATE * mean / (square.sqrt() + 1e-8)
            tensors = {"numbers": numbers.tolist(), "first": first.tolist(), "second": second.tolist()}
            state.put(name, {"step": step + 1, "multiplier": multiplier, **tensors})
        return numbers.detach()

    def _weights(self, gated: GatedModel, numbers: Tensor) -> Tensor:
        """Weights of all options; those of one site sum to one."""
        parts = [torch.softmax(numbers[start : start + len(site.options)], 0) for site, start in gated.starts.items()]
        return torch.cat(parts)

    def _savings(self, problem: Problem, gated: GatedModel) -> tuple[Tensor, float]:
        """What each option saves, a share of what its whole group does, and what can be saved in all."""
        savings, most = torch.zeros(gated.total), dict[object, float]()
        for group in problem.groups():
            options = group[0].options
            own = [problem.saving({}, dict.fromkeys(group, option)) / len(group) for option in options[1:]]
            for site in group:
                savings[gated.starts[site] + 1 :][: len(own)] = torch.tensor(own)
            most[group[0].group] = max(0.0, most.get(group[0].group, 0.0), *(len(group) * each for each in own))
        return savings, sum(most.values()) or 1.0


def is_relaxation(value: Any) -> bool:
    """Whether plain data is what a relaxation keeps of its training."""
    try:
        lists = [value[key] for key in ("numbers", "first", "second")]
        numbers = [value["step"], value["multiplier"], *(number for each in lists for number in each)]
    except (TypeError, KeyError):
        return False
    same = len({len(each) for each in lists}) == 1 and all(isinstance(each, list) for each in lists)
    same = same and isinstance(value["step"], int) and value["step"] >= 0
    return same and all(map(is_number, numbers))


def _saved(gated: GatedModel, gates: Tensor, savings: Tensor) -> Tensor:
    """What is saved at these weights: of heads only as far as no decision on their whole layer overrides theirs."""
    own_decide = {site.group: gates[start] for site, start in gated.starts.items() if site.covers}
    total = gates.new_zeros(())
    for site, start in gated.starts.items():
        saved = torch.dot(*(each[start : start + len(site.options)] for each in (gates, savings)))
        total = total + saved * (1.0 if site.covers else own_decide.get(site.group, 1.0))
    return total
