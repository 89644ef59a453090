"""Lower the live part of a logits graph to JAX functions, one for each operator of the model.

Each step computes one operator (with the views in front of it). The steps run one after the other on
secret shares, so bytes, messages and seconds are known for every operator of every layer, and steps that
compute the same thing (the layers of a transformer) share one compiled program.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from aero_compile.errors import LoweringError
from aero_compile.ir.ops import names_of, of_form
from aero_compile.ir.ownership import Domain
from aero_compile.runtime.arithmetic.exponential import Exponential, cheapest_exponential
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Tolerances
from aero_compile.runtime.lowering import attention
from aero_compile.runtime.lowering.blocks import Strip, blocked_scores, choose_strips
from aero_compile.runtime.lowering.bound_rules import RULES
from aero_compile.runtime.lowering.constants import checked_literal, to_numpy
from aero_compile.runtime.lowering.guard_plan import Plan, plan_guards
from aero_compile.runtime.lowering.guards import GUARD, count_name, final_step, guard_step
from aero_compile.runtime.lowering.live import (
    MOVES,
    Call,
    LiveProgram,
    LiveStep,
    Ref,
    describe,
    is_part,
    label,
    refusing,
)
from aero_compile.runtime.lowering.masks import Masked, find_mask
from aero_compile.runtime.lowering.norms import NO_DOUBLINGS, Doublings
from aero_compile.runtime.lowering.ownership import (
    refuse_huge_table,
    refuse_huge_weight,
    refuse_private_choices,
)
from aero_compile.runtime.lowering.partition import Partition, op_name, place_of
from aero_compile.runtime.operators import pointwise, products, registry, views
from aero_compile.runtime.operators.limits import Format
from aero_compile.runtime.operators.watching import watching
from aero_compile.runtime.program_parts import TOKENS

OPERATOR_MODULES = (pointwise, products, views)
"""Importing these fills the table of operators."""

_SOFTMAX = ("aten.softmax", "unnormalized_softmax")
_CASTS = names_of(of_form("cast", "cast_as", "reduction"))
_LIKE_SECOND = of_form("cast_as", "expand_as")  # the result has the type or shape of their second argument
_RESHAPING = names_of(of_form("reshape", "squeeze", "copy", "detach", "cast"))


def supported_ops() -> tuple[str, ...]:
    """Return the names of all live operators that can be lowered, sorted."""
    return registry.supported_ops()


def lower(
    part: Partition,
    *,
    exact: bool = False,
    dtype: Any = np.float32,
    spreads: Mapping[str, float] | None = None,
    tolerances: Tolerances = DEFAULT,
    guards: Format | None = None,
    doublings: Doublings = NO_DOUBLINGS,
) -> LiveProgram:
    """Lower every live node of `part` that the logits need.

    `exact=True` uses textbook functions instead of fixed-point approximations (for comparison with PyTorch in plain
    JAX); `dtype` is that of the weights. `spreads`: for softmaxes, by the name of their node, the largest
    difference of two scores of a row that will come; any may come where it says nothing. `tolerances`: how far off
    approximations may be. `guards`: the format whose ranges private checks keep where no bound shows that they are
    kept; None: none are made. `doublings`: by which powers of two the rows of norms are multiplied.

    Raises:
        InputError: no approximation is as close as is asked for.
        LoweringError: an operator cannot be lowered; the message names it and its place in the model.
    """
    return _Lowering(part, exact, dtype, spreads or {}, tolerances, guards, doublings).program()


@dataclass
class _Slot:
    """What one step knows about its inputs while it is being assembled."""

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


class _Lowering:
    def __init__(
        self,
        part: Partition,
        exact: bool,
        dtype: Any,
        spreads: Mapping[str, float],
        tolerances: Tolerances,
        guards: Format | None,
        doublings: Doublings,
    ) -> None:
        self.part, self.doublings = part, doublings
        self.spreads, self.tolerances = spreads, tolerances
        self.exponentials: dict[str, Exponential] = {}
        self.exact, self.dtype = exact, dtype
        self.masks: dict[fx.Node, Masked] = {}
        self.weights: dict[str, npt.NDArray[Any]] = {}
        self._weight_names: dict[object, str] = {}
        self._carries_tokens: dict[fx.Node, bool] = {}
        needed = self._needed()
        self.order = [n for n in part.graph.nodes if n in needed and n is not part.tokens]
        self.strips = dict(self._blocked_products())
        self.vocabulary = self._vocabulary()
        runs = all(op_name(n) in RULES for n in self.order if not self._is_tokens(n))  # else it is refused below
        self.plan = plan_guards(part, self.order, guards, self._is_tokens, doublings) if guards and runs else Plan()

    # --- which nodes, in which steps ------------------------------------------------------------------

    def _needed(self) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        waiting = [self.part.output]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting.extend(self._live_dependencies(node))
        return needed

    def _live_dependencies(self, node: fx.Node) -> list[fx.Node]:
        if op_name(node) in _SOFTMAX:
            if node not in self.masks:
                scores = node.args[0]
                assert isinstance(scores, fx.Node)
                self.masks[node] = find_mask(self.part, scores)
            return [self.masks[node].core]
        if node.target in _LIKE_SECOND:
            first = node.args[0]
            assert isinstance(first, fx.Node)
            return [first]
        return [used for used in node.all_input_nodes if self.part.is_live(used)]

    def _blocked_products(self) -> Iterator[tuple[fx.Node, tuple[Strip, ...]]]:
        """Score products that only a masked softmax reads, with the strips of them that it reads."""
        readers: dict[fx.Node, set[fx.Node]] = {}
        for node in self.order:
            for used in self._live_dependencies(node):
                readers.setdefault(used, set()).add(node)
        for node, mask in self.masks.items():
            product = mask.core
            if op_name(product) == "aten.matmul" and mask.allowed is not None and readers[product] == {node}:
                shape = self.part.shapes[product]
                allowed = np.broadcast_to(mask.allowed, shape).any(axis=tuple(range(len(shape) - 2)))
                left = product.args[0]
                if isinstance(left, fx.Node) and left in self.part.shapes:
                    yield product, choose_strips(allowed, self.part.shapes[left][-1])

    def _vocabulary(self) -> int:
        """Rows of the table that the tokens index; they must agree if there are several."""
        rows: dict[int, str] = {}
        for node in self.order:
            table, _ = self._lookup(node)
            if table is not None:
                rows[int(self.part.known[table].shape[0])] = node.name
        if len(rows) != 1:
            raise LoweringError(f"the tokens index tables of {sorted(rows)} rows; exactly one vocabulary is supported")
        return next(iter(rows))

    def _lookup(self, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """Return (table, tokens) if `node` looks rows of a table up by the tokens, else (None, None)."""
        table: object = None
        ids: object = None
        if op_name(node) == "aten.embedding":
            table, ids = node.args[0], node.args[1]
        elif op_name(node) == "aten.index":
            indices = node.args[1]
            if isinstance(indices, (list, tuple)) and len(indices) == 1:
                table, ids = node.args[0], indices[0]
        if isinstance(table, fx.Node) and not self.part.is_live(table) and self.part.is_live(ids):
            assert isinstance(ids, fx.Node)
            return table, ids
        return None, None

    def program(self) -> LiveProgram:
        groups: list[list[fx.Node]] = [[]]
        for node in self.order:
            groups[-1].append(node)
            if self._ends_step(node):
                groups.append([])
        groups = [group for group in groups if group]
        last_reader: dict[fx.Node, int] = {self.part.output: len(groups)}
        for at, group in enumerate(groups):
            for node in group:
                for used in self._live_dependencies(node):
                    last_reader[used] = max(last_reader.get(used, 0), at)
        steps: list[LiveStep] = []
        for at, group in enumerate(groups):
            kept = [n for n in group if last_reader.get(n, -1) > at or n in self.plan.guards]
            steps.append(self._step(group, kept))
            steps += [
                guard_step(n, guard, self.part.shapes[n], np.dtype(self.dtype).name)
                for n in group
                for guard in self.plan.guards.get(n, ())
            ]
        guard = final_step(steps)
        batch, length = self.part.shapes[self.part.tokens]
        return LiveProgram(
            (*steps, guard) if guard else tuple(steps),
            self.weights,
            (batch, length, self.vocabulary),
            self.part.output.name,
            self.part.shapes[self.part.output],
            frozenset(node.name for node in self.order),
            self.exponentials,
            GUARD if guard else None,
            self.plan.checks(),
        )

    def _ends_step(self, node: fx.Node) -> bool:
        if op_name(node) == "unnormalized_softmax":
            return False  # a pair: the step goes on until both its parts are taken
        if is_part(node):
            source = node.args[0]
            return isinstance(source, fx.Node) and node is next(n for n in reversed(self.order) if n in source.users)
        computes = op_name(node) not in MOVES and not self._is_tokens(node)
        return computes or self._lookup(node)[0] is not None

    def _is_tokens(self, node: fx.Node) -> bool:
        """Whether a node carries token ids (represented by one-hot rows) or integers made of them."""
        if node is self.part.tokens:
            return True
        if node not in self._carries_tokens:
            live = [] if self._lookup(node)[0] is not None else self._live_dependencies(node)
            self._carries_tokens[node] = bool(live) and all(self._is_tokens(used) for used in live)
        return self._carries_tokens[node]

    def _step(self, group: list[fx.Node], outputs: list[fx.Node]) -> LiveStep:
        slot = _Slot(group)
        resolved = [(node, self._resolve(slot, node)) for node in group]
        names = tuple(slot.inputs)
        spec = [[f"{i}", op_name(node), describe(call, group, names)] for i, (node, call) in enumerate(resolved)]
        main = group[-1]
        watched = [self.plan.watched.get(node, {}) for node in group]
        text = json.dumps([spec, list(slot.inputs.values()), [group.index(n) for n in outputs], self.exact, watched])

        def function(*values: Any) -> tuple[Any, ...]:
            environment: dict[str, Any] = dict(zip(names, values, strict=True))
            outside: list[Any] = []
            for (node, call), wanted in zip(resolved, watched, strict=True):
                with watching(wanted) as watch:
                    environment[node.name] = call(environment)
                outside += watch.outside
            counts = (sum(outside[1:], outside[0]).reshape((1,)),) if outside else ()
            return (*(environment[node.name] for node in outputs), *counts)

        return LiveStep(
            label(main, self._lookup(main)[0] is not None),
            place_of(main),
            hashlib.sha256(text.encode()).hexdigest()[:16],
            names,
            (*(node.name for node in outputs), *([count_name(main)] if any(watched) else [])),
            tuple(shape for shape, _ in slot.inputs.values()),
            tuple(dtype for _, dtype in slot.inputs.values()),
            function,
        )

    # --- one node -------------------------------------------------------------------------------------

    def _resolve(self, slot: _Slot, node: fx.Node) -> Call:
        table, ids = self._lookup(node)
        if table is not None and ids is not None:
            return Call(products.embed, {"ids": self._argument(slot, ids), "table": self._argument(slot, table)}, {})
        if self._is_tokens(node):
            return self._token_view(slot, node)
        if op_name(node) in _SOFTMAX:
            mask = self.masks[node]
            split = op_name(node) == "unnormalized_softmax"
            dim = node.args[1]
            assert isinstance(dim, int)
            rank = len(self.part.shapes[node])
            if mask.empty_row_with_numbers(dim % rank, rank):
                raise self._unsupported(
                    node,
                    "a row of its mask allows nothing but is filled with finite numbers, over which PyTorch averages "
                    "hidden entries; fill it with -inf (the row becomes zeros), or let it see itself",
                )
            return Call(
                attention.unnormalized_softmax if split else attention.masked_softmax,
                {"x": self._argument(slot, mask.core)},
                {
                    "mask": mask,
                    "dim": dim % rank,
                    "exact": self.exact,
                    "exponential": self._exponential(node),
                },
            )
        function = registry.find(op_name(node))
        if function is None and op_name(node) not in ("getitem", "dropout"):
            raise self._unsupported(node, "this operator is not supported")
        if any(self._is_tokens(used) for used in self._live_dependencies(node)):
            raise self._unsupported(node, "token ids can only be looked up in an embedding table")
        if op_name(node) in _CASTS and not self._keeps_kind(node):
            raise self._unsupported(node, "it turns secret numbers into integers")
        arguments = self._bind(node)
        refuse_private_choices(self.part, node, arguments)
        live = {name: self._argument(slot, value) for name, value in arguments.items()}
        if len(self.strips.get(node, ())) > 1:
            queries, keys = live["x"], live["other"]
            return Call(blocked_scores, {"queries": queries, "keys": keys}, {"strips": self.strips[node]})
        if op_name(node) == "getitem":
            return Call(views.getitem, live, {})
        if op_name(node) == "dropout":
            return Call(views.first, {"x": next(iter(live.values()))}, {})
        assert function is not None
        options = {"exact": self.exact, "tolerances": self.tolerances} | self.doublings.of(node)
        return Call(refusing(function, self._unsupported, node), live, options)

    def _exponential(self, node: fx.Node) -> Exponential:
        """The cheapest exponential for the scores that may come to a softmax."""
        name = node.meta.get("softmax", node.name)
        scores, spread = self.part.shapes[node], self.spreads.get(name, math.inf)
        dim = node.args[1]
        assert isinstance(dim, int)
        self.exponentials[name] = cheapest_exponential(spread, self.tolerances.softmax, scores[dim])
        return self.exponentials[name]

    def _bind(self, node: fx.Node) -> dict[str, Any]:
        """Match arguments to the names of the ATen schema (`self` becomes `x`)."""
        bound = registry.bind(node.target, node.args, node.kwargs)
        if node.target in _LIKE_SECOND:
            bound["other"] = None
        if op_name(node) == "aten.expand_as":
            bound["size"] = list(self.part.shapes[node])
        return bound

    def _keeps_kind(self, node: fx.Node) -> bool:
        source = self._live_dependencies(node)[0]
        return self.part.is_float[node] or not self.part.is_float[source]

    def _token_view(self, slot: _Slot, node: fx.Node) -> Call:
        live = self._live_dependencies(node)
        if op_name(node) in MOVES and len(live) == 1 and self._is_tokens(live[0]):
            shape = (*self.part.shapes[node], self.vocabulary)
            if op_name(node) in _RESHAPING:
                return Call(views.reshaped, {"x": self._argument(slot, live[0])}, {"shape": shape})
        raise self._unsupported(
            node, "it computes integers or booleans from the token ids; only embedding lookups may read them"
        )

    def _argument(self, slot: _Slot, value: Any) -> Any:
        """Turn a node argument into a reference to a value of the step, a constant, or a literal."""
        if isinstance(value, (list, tuple)):
            return [self._argument(slot, each) for each in value]
        if not isinstance(value, fx.Node):
            return checked_literal(value)
        if self.part.is_live(value):
            if value not in slot.nodes:
                tokens = value is self.part.tokens
                shape = self.part.shapes[value] + ((self.vocabulary,) if self._is_tokens(value) else ())
                kind = np.dtype(self.dtype).name if self.part.is_float[value] else "bool"
                kind = "int32" if tokens or self._is_tokens(value) else kind
                slot.inputs.setdefault(TOKENS if tokens else value.name, (shape, kind))
            return Ref(TOKENS if value is self.part.tokens else value.name)
        known = self.part.known[value]
        owned = self.part.domains[value] is Domain.SERVER
        if owned and not isinstance(known, torch.Tensor):
            raise self._unsupported(value, "it makes a Python value of the server's numbers, which would be public")
        if not isinstance(known, torch.Tensor):
            return self._argument(slot, known) if isinstance(known, (list, tuple)) else known
        array = to_numpy(known, self.dtype)
        if owned:
            array = array.astype(self.dtype)  # SPU's inputs of the server are numbers, flags and counts too
            name = self._weight(value, known, array)
            slot.inputs.setdefault(name, (array.shape, array.dtype.name))
            return Ref(name)
        refuse_huge_table(value, array)
        return array

    def _weight(self, node: fx.Node, tensor: torch.Tensor, array: npt.NDArray[Any]) -> str:
        refuse_huge_weight(node, array)
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
        name = self._weight_names.setdefault(key, f"w:{node.target}" if node.op == "get_attr" else f"w:{node.name}")
        self.weights[name] = array
        return name

    def _unsupported(self, node: fx.Node, reason: str) -> LoweringError:
        return LoweringError(
            f"cannot run {op_name(node)} (node {node.name}, in {place_of(node)}) privately: {reason}. "
            f"Supported: {', '.join(registry.supported_ops())}"
        )
