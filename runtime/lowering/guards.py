"""Private checks of values that no bound holds for: all of them make one bit, which both parties open at the end.

Where the bounds of ``bound_rules`` do not show that an operator's operands stay small enough, a guard compares the
value itself. It need not compare every entry of a row x: it compares ``COMBINATIONS`` sums r·x with public random signs
r. If an entry is larger than the limit, then of any two signs it may take in a sum at least one makes the sum larger
than the limit too, so each sum misses it with a chance of 1/2 at most, and all of them with 2^-20. This holds modulo
2^64 as well. A row whose entries are small but which is longer than 4 times the limit is missed no more often, by the
theorem of Berry and Esseen: a sum lies within the limit with a chance of (0.8 + 1.12) / 4 < 1/2.

The chances are over the signs, which are fixed: they hold for tokens that were not chosen to fit them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from aero_compile.errors import LoweringError
from aero_compile.runtime.arithmetic.constants import mean
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.lowering import bounds
from aero_compile.runtime.lowering.bound_rules import RULES
from aero_compile.runtime.lowering.bounds import Bound, Shape
from aero_compile.runtime.lowering.live import LiveStep
from aero_compile.runtime.lowering.masks import Masked, find_mask
from aero_compile.runtime.lowering.norms import NO_DOUBLINGS, Doublings
from aero_compile.runtime.lowering.partition import Domain, Partition, op_name, place_of
from aero_compile.runtime.operators import registry
from aero_compile.runtime.operators.limits import LEAST_DEVIATION, LEAST_VARIANCE, LIMITS, Format, Quantity
from aero_compile.runtime.operators.watching import count_outside

COMBINATIONS = 20
"""Sums of a row that are compared: a row outside is missed with a chance of 2^-20."""

GUARD = "guard"
"""Name of the value that both parties open: 1 if any value left its range, else 0."""

_AT_ONCE = 2**22  # entries of signed copies of rows that are held at a time
_TOO_SMALL = 1e-3

Ends = tuple[float | None, float | None]


@dataclass(frozen=True)
class Guard:
    """A check of a value: rows along its last axis, entries of at most ``limit``; ``centered``: less their mean."""

    limit: float
    centered: bool = False

    def outside(self, x: Any) -> Any:
        """How many sums are larger than the limit, for a JAX array; 1 array of shape [1]."""
        size = x.shape[-1]
        if self.centered:
            x = x - mean(x, axis=-1, keepdims=True)
        if size > COMBINATIONS:
            signs = combinations(size)
            step = max(1, _AT_ONCE // max(1, math.prod(x.shape)))
            parts = [_signed_sums(x, signs[at : at + step]) for at in range(0, COMBINATIONS, step)]
            x = parts[0] if len(parts) == 1 else jnp().concatenate(parts, axis=-1)
        return count_outside(x, -self.limit, self.limit).reshape((1,))

    def reaches(self, x: Tensor) -> float:
        """The largest sum, in PyTorch, in the clear."""
        x = x.double()
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        if x.shape[-1] > COMBINATIONS:
            signs = torch.from_numpy(np.where(combinations(x.shape[-1]), 1.0, -1.0))
            x = x @ signs.to(x.device).T
        return float(x.abs().max()) if x.numel() else 0.0


def combinations(size: int) -> npt.NDArray[np.bool_]:
    """The signs of the sums, bool [COMBINATIONS, size]: public, and the same for all rows of one size."""
    return np.random.default_rng(size).integers(0, 2, (COMBINATIONS, size)).astype(np.bool_)


def _signed_sums(x: Any, signs: npt.NDArray[np.bool_]) -> Any:
    wide = x[..., None, :]
    return jnp().where(signs, wide, -wide).sum(axis=-1)


def count_name(node: fx.Node) -> str:
    """Name of the number of values outside that an operator found inside itself."""
    return f"{GUARD}:{node.name}"


def guard_step(node: fx.Node, guard: Guard, shape: Shape, dtype: str) -> LiveStep:
    """A step that counts what lies outside of a node's guard."""
    name = f"{count_name(node)}:{'centered' if guard.centered else 'limit'}"
    text = repr((guard, shape, dtype, COMBINATIONS))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return LiveStep(
        *(GUARD, place_of(node), key, (node.name,), (name,), (shape,), (dtype,)),
        lambda x: (guard.outside(x),),
    )


def final_step(steps: Sequence[LiveStep]) -> LiveStep | None:
    """The step that makes one bit of all counts: ``GUARD``, 1 if any is not 0, else 0; None if nothing is counted."""
    counts = tuple(name for step in steps for name in step.outputs if name.startswith(f"{GUARD}:"))
    if not counts:
        return None

    def any_outside(*values: Any) -> tuple[Any]:
        return (jnp().where(sum(values[1:], values[0]) > 0.5, 1.0, 0.0),)

    shapes, key = ((1,),) * len(counts), f"{GUARD}:{len(counts)}"
    return LiveStep(*(GUARD, "all checks", key, counts, (GUARD,), shapes, ("float32",) * len(counts)), any_outside)


@dataclass(frozen=True)
class Plan:
    """``guards`` of the values that nodes compute, and what to ``watch`` inside of nodes: (low, high) by name."""

    guards: Mapping[fx.Node, tuple[Guard, ...]] = field(default_factory=dict)
    watched: Mapping[fx.Node, Mapping[str, Ends]] = field(default_factory=dict)


@dataclass(frozen=True)
class GuardCheck:
    """An observer for ``partition``: finds text on which a guard would end the run. ``guards`` by name of a node."""

    guards: Mapping[str, tuple[Guard, ...]]
    found: list[str] = field(default_factory=list)

    def __call__(
        self, node: fx.Node, domains: object, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> None:
        for guard in self.guards.get(node.name, ()):
            reached = guard.reaches(value)
            if not reached <= guard.limit:
                self.found.append(
                    f"rows of the result of {op_name(node)} (node {node.name}, in {place_of(node)}) reach "
                    f"{reached:.4g} on this text, and the private check allows {guard.limit:.4g}: every run on such "
                    "text would end without logits. Rescale the model, or choose other fraction bits or a larger ring"
                )

    def raise_first(self) -> None:
        """Raise LoweringError if the text would end a run."""
        if self.found:
            raise LoweringError(self.found[0])


def plan_guards(
    part: Partition,
    order: Sequence[fx.Node],
    form: Format,
    is_tokens: Callable[[fx.Node], bool],
    doublings: Doublings = NO_DOUBLINGS,
) -> Plan:
    """Find the values of the live nodes ``order`` that need a guard, as few and as early ones as possible.

    Raises:
        LoweringError: an operator holds on no range that a guard could keep.
    """
    return Planner(part, order, form, is_tokens, doublings).plan()


class Planner:
    """Follows bounds through the graph, from the start again after each guard that turned out to be needed."""

    def __init__(
        self,
        part: Partition,
        order: Sequence[fx.Node],
        form: Format,
        is_tokens: Callable[[fx.Node], bool],
        doublings: Doublings = NO_DOUBLINGS,
    ) -> None:
        self.doublings = doublings
        self.part, self.order, self.form = part, [n for n in order if not is_tokens(n)], form
        self.limits: dict[fx.Node, float] = {}
        self.centered: dict[fx.Node, Guard] = {}
        self.watched: dict[fx.Node, dict[str, Ends]] = {}
        self.bounds: dict[fx.Node, Bound] = {}
        self._of_known: dict[fx.Node, Bound] = {}
        self._matrices: dict[tuple[int, bool], tuple[Tensor, bounds.Weight]] = {}
        self._missing: dict[fx.Node, float] = {}
        self._at: fx.Node | None = None

    def plan(self) -> Plan:
        while True:
            self._missing, self.bounds, self.watched, self.centered = {}, {}, {}, {}
            for node in self.order:
                self._visit(node)
                if self._missing:
                    break
            if not self._missing:
                break
            for source, limit in self._missing.items():
                self._limit(source, limit)
        guards = {node: (Guard(limit),) for node, limit in self.limits.items()}
        for node, guard in self.centered.items():
            guards[node] = (*guards.get(node, ()), guard)
        return Plan(guards, self.watched)

    def _limit(self, node: fx.Node, limit: float) -> None:
        known = self.limits.get(node)
        limit = limit if known is None else min(limit, known / 2)  # rows of another axis: only small entries bound them
        if not limit > _TOO_SMALL:
            raise self._unbounded(node)
        self.limits[node] = 2.0 ** math.floor(math.log2(limit))  # shown by the program: no more than that

    def _unbounded(self, node: fx.Node) -> LoweringError:
        at = self._at if self._at is not None else node
        return LoweringError(
            f"nothing bounds the values of {op_name(node)} (node {node.name}, in {place_of(node)}) to where "
            f"{op_name(at)} (in {place_of(at)}) holds; compile with guards=False to run it unchecked"
        )

    def _visit(self, node: fx.Node) -> None:
        self._at = node
        given = registry.bind(node.target, node.args, node.kwargs)
        self._inside(node, given)
        if not self._missing:
            found = RULES[op_name(node)](self, node, given)
            most = 2 * self.form.limit if op_name(node) in _PRODUCTS else self.form.sum_limit  # 2: of a bias
            if not self._missing and not found.peak <= most:
                raise self._unbounded(node)
            self.bounds[node] = self._limited(node, found)

    def _limited(self, node: fx.Node, found: Bound) -> Bound:
        limit = self.limits.get(node)
        if limit is not None:
            found = replace(
                found,
                low=max(found.low, -limit),
                high=min(found.high, limit),
                length=min(found.length, 4 * limit),
            )
        return found.fitted(self.part.shapes[node]) if node in self.part.shapes else found

    # --- what an operator computes inside -------------------------------------------------------------

    def _inside(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        name = op_name(node)
        if name not in LIMITS:
            return
        stand_ins = {key: self._stand_in(value) for key, value in given.items()}
        public = {
            key
            for key, value in given.items()
            if isinstance(value, fx.Node) and self.part.domains[value] is Domain.PUBLIC
        }
        options = self.doublings.of(node)
        if options.get("folded"):
            options = {}  # rows come doubled: limits are those of what they are then
        for quantity in LIMITS[name](self.form, stand_ins | options, public):
            if quantity.what == "sum of squares":
                self._rows_to_square(node, given, quantity.high)
            elif quantity.what == "smaller of dividend and divisor":
                self._narrow(node, given, quantity.high)
            elif quantity.what == "variance":
                self._watch(node, given, quantity, gain=4.0 ** options.get("doublings", 0))
            elif quantity.what not in _ELSEWHERE:
                self._watch(node, given, quantity)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if self.part.is_live(value):
            return torch.empty(self.part.shapes.get(value, ()), device="meta")
        return self.part.known[value]

    def _rows_to_square(self, node: fx.Node, given: Mapping[str, Any], limit: float) -> None:
        """Squares of a norm must not wrap, one by one; their sum is watched as the variance."""
        x, peak = given["input"], math.sqrt(limit)
        centers = op_name(node) == "aten.layer_norm"
        if self.of(x).peak * (2 if centers else 1) <= peak:
            return
        if not centers:
            self.need(x, peak)
        elif len(given["normalized_shape"]) > 1:
            self.need(x, peak / 2)
        elif x.op != "placeholder":
            self._in_ring(x)
            self.centered[x] = Guard(peak, centered=True)

    def _narrow(self, node: fx.Node, given: Mapping[str, Any], high: float) -> None:
        if self.of(given["x"]).peak > high:
            low, most = self.watched.get(node, {}).get("divisor", (None, None))
            self.watched.setdefault(node, {})["divisor"] = (low, min(high, most or high))

    def _watch(self, node: fx.Node, given: Mapping[str, Any], quantity: Quantity, gain: float = 1.0) -> None:
        """``gain``: what an operator looks at is so many times the quantity."""
        found = self._reached(quantity.what, node, given)
        ends = (
            None if found.low >= quantity.low else gain * quantity.low,
            None if found.high <= quantity.high else gain * quantity.high,
        )
        if ends != (None, None):
            self.watched.setdefault(node, {})[quantity.what] = ends

    def _reached(self, what: str, node: fx.Node, given: Mapping[str, Any]) -> Bound:
        if what == "variance":
            x, shape = self.of(given["input"]), self.shape(given["input"])
            return Bound(0.0, min(x.fitted(shape).length ** 2 / shape[-1], x.peak**2))
        found = self.of(given["other"] if op_name(node) == "aten.div" else given["x"])
        if what == "argument":
            return found
        least = 0.0 if found.low <= 0 <= found.high else min(abs(found.low), abs(found.high))
        return Bound(least, found.peak)

    # --- what rules ask for ---------------------------------------------------------------------------

    def of(self, value: Any) -> Bound:
        if not isinstance(value, fx.Node):
            return bounds.of_known(value)
        if value in self.bounds:
            return self.bounds[value]
        if value not in self._of_known:
            self._of_known[value] = bounds.of_known(self.part.known[value])
        return self._of_known[value]

    def shape(self, value: Any) -> Shape:
        if isinstance(value, fx.Node) and value in self.part.shapes:
            return self.part.shapes[value]
        known = self.known(value)
        return () if known is None else tuple(known.shape)

    def known(self, value: Any) -> Tensor | None:
        if isinstance(value, fx.Node):
            value = self.part.known.get(value)
        return value if isinstance(value, Tensor) else None

    def matrix(self, weight: Tensor, transposed: bool = False) -> bounds.Weight:
        key = id(weight), transposed
        if key not in self._matrices:
            table = weight[:, None] if weight.dim() == 1 else weight.mT if transposed else weight
            self._matrices[key] = weight, bounds.of_matrix(table)  # held, so that no other takes its number
        return self._matrices[key][1]

    def hides(self, value: Any) -> bool:
        return self.part.is_live(value)

    def mask(self, node: fx.Node) -> Masked:
        scores = node.args[0]
        assert isinstance(scores, fx.Node)
        return find_mask(self.part, scores)

    def need(self, value: Any, peak: float) -> None:
        for source in self._sources(value):
            self._in_ring(source)
            self._missing[source] = min(peak, self._missing.get(source, math.inf))

    def _in_ring(self, node: fx.Node) -> None:
        """Sums of a row must not come near the end of the ring, so that what is compared is what it seems."""
        row = (self.shape(node) or (1,))[-1]
        if not row * self.bounds[node].peak <= self.form.sum_limit:
            raise self._unbounded(node)

    def _sources(self, value: Any) -> set[fx.Node]:
        """The values whose entries ``value`` only arranges anew: whole rows are fewer than those of single heads.

        Parts of a value are left as they are: the rest of its rows may be as large as it likes.
        """
        if not self.part.is_live(value):
            return set()
        if op_name(value).removeprefix("aten.") not in _ARRANGING:
            return {value}
        return {source for used in value.all_input_nodes for source in self._sources(used)}


_ELSEWHERE = frozenset({"product", LEAST_DEVIATION, LEAST_VARIANCE})
"""What is not watched: a rule of products sees to it, or it costs accuracy alone and wraps nothing."""

_PRODUCTS = frozenset(
    f"aten.{name}" for name in ["matmul", "mm", "bmm", "linear", "einsum", "mul", "square", "pow", "div"]
)
_MOVES = (
    "view reshape _unsafe_view flatten unflatten unsqueeze squeeze expand expand_as repeat transpose t permute movedim "
    "cat stack clone alias contiguous detach lift_fresh_copy to _to_copy type_as dropout feature_dropout"
)
_ARRANGING = frozenset(_MOVES.split(" "))
