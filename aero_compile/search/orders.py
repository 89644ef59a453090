"""Orders in which operations are given up: each yields decisions, every one cheaper than the one before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aero_compile.search.sites import Decisions, Site

REMEASURED = 4
"""Moves that greedy measures anew before each step, those that were best when last measured."""

STEP = 1 / 50
"""Share of all that can be saved that one step of greedy may take with more than one move."""


@dataclass(frozen=True)
class Problem:
    """What an order is made for.

    `price` (in the budget's measure) and `loss` (nats a token, on the probe) are those of any decisions.
    """

    sites: Sequence[Site]
    price: Callable[[Decisions], float]
    loss: Callable[[Decisions], float]

    def singles(self) -> list[dict[Site, str]]:
        """Each alternative of each site by itself."""
        return [{site: option} for site in self.sites for option in site.options[1:]]

    def moves(self) -> list[dict[Site, str]]:
        """Singles, and whole groups at once: the last softmax of a layer may save more than all before it."""
        covered = {(site.group, option) for site in self.sites if site.covers for option in site.options}
        several = [group for group in self.groups() if len(group) > 1]
        return [
            *self.singles(),
            *(dict.fromkeys(g, o) for g in several for o in g[0].options[1:] if (g[0].group, o) not in covered),
        ]

    def groups(self) -> list[list[Site]]:
        """Sites that cost less together; one that covers others is by itself."""
        found: dict[object, list[Site]] = {}
        for site in self.sites:
            found.setdefault((site.group, site.covers), []).append(site)
        return list(found.values())

    def cheapest(self, last: bool = False) -> dict[Site, str]:
        """Of every group the alternative that saves most, the first of such (or the last), where one saves anything."""
        found: dict[Site, str] = {}
        for group in self.groups():
            options = reversed(group[0].options[1:]) if last else group[0].options[1:]
            savings = {option: self.saving({}, dict.fromkeys(group, option)) for option in options}
            best = max(savings, key=lambda option: savings[option])
            if savings[best] > 0:
                found |= dict.fromkeys(group, best)
        return found

    def effect(self, before: Decisions, move: Decisions) -> float:
        """By how much the loss rises."""
        old, new = self.loss(before), self.loss({**before, **move})
        return new - old if math.isfinite(old) else 0.0

    def saving(self, before: Decisions, move: Decisions) -> float:
        """By how much the price falls."""
        return self.price(before) - self.price({**before, **move})


def greedy(problem: Problem) -> Iterator[Decisions]:
    """The move of the least loss for what it saves first; effects change as others go, and are measured again.

    All effects are measured at the start; before each step those of the moves that look best are measured anew, until
    the best of them is better than all others were (lazy greedy: Minoux 1978), or `REMEASURED` were. What was measured
    and is better than all others goes together, up to a share `STEP` of what can be saved in all.
    """
    moves, decided = problem.moves(), dict[Site, str]()
    effects = [problem.effect({}, move) for move in moves]
    largest = STEP * problem.saving({}, problem.cheapest())
    while True:
        savings = [problem.saving(decided, move) for move in moves]
        possible = [i for i, saving in enumerate(savings) if saving > 0 and _is_new(decided, moves[i])]
        if not possible:
            return
        possible.sort(key=lambda i: (effects[i] / savings[i], i))
        measured, best = list[tuple[float, int]](), math.inf
        for i in possible[:REMEASURED]:
            if measured and effects[i] / savings[i] >= best:
                break
            effects[i] = problem.effect(decided, moves[i])
            measured.append((effects[i] / savings[i], i))
            best = min(best, effects[i] / savings[i])
        others = min((effects[i] / savings[i] for i in possible[len(measured) :]), default=math.inf)
        before = problem.price(decided)
        for number, (ratio, i) in enumerate(sorted(measured)):
            after = {**decided, **moves[i]}
            if number and (ratio > others or before - problem.price(after) > largest):
                break
            decided = after
        yield decided


def single(problem: Problem) -> Iterator[Decisions]:
    """The move of the least loss for what it saves first, both measured once, each move alone."""
    ranked = []
    for i, move in enumerate(problem.singles()):
        saving = problem.saving({}, move)
        if saving > 0:
            ranked.append((problem.effect({}, move) / saving, i, move))
    yield from in_order(problem, [move for _, _, move in sorted(ranked, key=lambda each: each[:2])])


def at_random(problem: Problem, seed: int) -> Iterator[Decisions]:
    """Sites in a random order, each replaced by what is cheapest."""
    sites = sorted(problem.sites, key=str)
    random.Random(seed).shuffle(sites)
    cheapest = problem.cheapest()
    yield from in_order(problem, [{site: cheapest[site]} for site in sites if site in cheapest])


def by_score(problem: Problem, scores: Mapping[Site, float]) -> Iterator[Decisions]:
    """Sites with the highest score first, each replaced by what is cheapest; those without a score last."""
    sites = sorted(problem.sites, key=lambda site: (-scores.get(site, -math.inf), str(site)))
    cheapest = problem.cheapest()
    yield from in_order(problem, [{site: cheapest[site]} for site in sites if site in cheapest])


def in_order(problem: Problem, moves: Iterable[Decisions]) -> Iterator[Decisions]:
    """These moves one after the other, without those that make it dearer."""
    decided: dict[Site, str] = {}
    for move in moves:
        if _is_new(decided, move) and problem.saving(decided, move) >= 0:
            decided = {**decided, **move}
            yield decided


def _is_new(decided: Decisions, move: Decisions) -> bool:
    return any(decided.get(site) != option for site, option in move.items())
