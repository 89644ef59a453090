"""eliminate-ffn: write the residual stream in a basis of each layer's own, in which linear FFNs cost nothing.

Before → after, for a sequential block whose linear FFN and residual connection are one matrix M_l:
    x_{l+1} = (x_l + a_l·W_o)·M_l + c_l      → z_{l+1} = z_l + a_l·(W_o·R_l) + c_l·R_{l+1}
    linear(x_l, W) (queries, keys, values)   → linear(z_l, W·R_l⁻ᵀ)
    embedding(E, ids) + positions            → embedding(E·R_0, ids) + positions·R_0

with z_l = x_l·R_l and R_l = M_l·R_{l+1}. A parallel block, x_l·M_l + a_l·W_o·β + c_l, has a_l·(β·W_o·R_{l+1}) instead.
Every other linear reader (the first layer of an FFN with activation, the LM head) takes R⁻¹ too, and gets a weight of
its own if it was tied. Norms, and all else that is not linear, read the stream as it is: R is the identity there.

R is ill-conditioned in the end, and the fixed point of a private run has only so many bits (`_bases`): where a
condition would exceed the bound, the basis starts anew, at the cost of one d×d product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from aero_compile.analysis.layer_text import layers_text
from aero_compile.analysis.parts import FeedForward
from aero_compile.analysis.residual_stream import Basis, ResidualStream, State, cost, new_cost
from aero_compile.errors import InputError
from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.model import TransformedModel
from aero_compile.passes.inference._bases import Segment, find_segments
from aero_compile.passes.inference._stream_rewriting import StreamRewriting
from aero_compile.passes.inference.fuse_linear_ffn import name_of, why_not_linear

PREFIX = "eliminate_ffn"

LARGEST_CONDITION = 64.0
"""Values and errors grow by √64 at most, three bits of the fixed point; a trained 4-layer GPT-2 (d = 64) is at 5."""


@dataclass(frozen=True)
class EliminateFFN(GraphPass):
    """Eliminate the linear FFNs of `model`, in place; the function stays the same.

    Weights are multiplied in float64 and stored in the model's dtype. Works for any batch and length. A model in which
    FFNs were eliminated stays as it is: the bound is meant with respect to the basis that it had before.

    Args:
        model: an inference copy.
        largest_condition: largest condition (see `_bases`) of a segment of layers with one basis, at least 1. Larger
            values restart the basis less often and cost precision.

    Raises:
        InputError: `largest_condition` is less than 1.
    """

    largest_condition: float = LARGEST_CONDITION

    name: ClassVar[str] = "eliminate-ffn"
    preserves_numerics: ClassVar[bool] = True
    for_inference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.largest_condition >= 1:
            raise InputError(f"largest_condition={self.largest_condition}: the condition of a basis is at least 1")

    def call(self, model: TransformedModel) -> PassResult:
        if any(name.startswith(f"{PREFIX}.") for name, _ in model.named_parameters()):
            return PassResult(model, modified=False)
        stream, ffns = ResidualStream(model), model.structure.ffns
        plan = _Plan(stream, self.largest_condition)
        done, left = tuple(plan.done(ffns)), tuple(plan.left(ffns))
        if plan.saved() <= 0:
            return PassResult(model, False, (), left)
        rewriting = StreamRewriting(stream, PREFIX, plan.bases)
        for state in plan.rewritten:
            rewriting.rewrite(state, plan.parents.get(state))
        rewriting.finish()
        return PassResult(model, True, done, left)


class _Plan:
    """The bases of all states. `parents[h]` is the state that h continues without a product."""

    def __init__(self, stream: ResidualStream, largest: float) -> None:
        self.stream = stream
        self.bases: dict[fx.Node, Basis] = {}
        self.parents: dict[State, fx.Node] = {}
        self.segments: list[tuple[Segment, list[State]]] = []
        for states in _chains(stream):
            steps = [state.skips[0][1] for state in states[1:]]
            for segment in find_segments(steps, [state.fixed for state in states], largest):
                if any(step.dim() for step in steps[segment.first : segment.last]):
                    self._take(segment, states[segment.first : segment.last + 1], steps)
        self.looked_up = [state for state in stream.states.values() if self._goes_into_table(state)]
        changed = {*self.bases, *(state.node for state in self.looked_up)}
        self.rewritten = [
            state
            for state in stream.states.values()
            if changed & {state.node, *(leaf for leaf, _ in (*state.leaves, *state.averaged))}
        ]

    def _take(self, segment: Segment, states: list[State], steps: Sequence[Tensor]) -> None:
        self.segments.append((segment, states))
        for number, basis in segment.bases(steps).items():
            if basis[0].dim() or float(basis[0]) != 1:
                self.bases[states[number - segment.first].node] = basis
        for before, state in itertools.pairwise(states):
            self.parents[state] = before.node

    def _goes_into_table(self, state: State) -> bool:
        """Whether linear layers take token vectors alone, so that the table can hold their results."""
        dense = any(self.stream.is_looked_up(leaf, state) and shape for leaf, shape in state.leaves)
        return dense and new_cost(self.stream, state, {}) < cost(self.stream, state)

    def saved(self) -> int:
        """How many fewer weights are multiplied."""
        return sum(
            cost(self.stream, state) - new_cost(self.stream, state, self.bases, self.parents.get(state))
            for state in self.rewritten
        )

    def done(self, ffns: Sequence[FeedForward]) -> Iterator[str]:
        """A sentence for each segment."""
        for segment, states in self.segments:
            inside = [ffn.layer for ffn in ffns if any(ffn.output in state.region for state in states[1:])]
            places = f"FFN of {layers_text(inside)}" if inside else "linear layers of the residual stream"
            yield f"{places}: no product left, in a basis of condition {segment.condition:.3g}"
        for state in self.looked_up:
            names = ", ".join(name_of(ffn) for ffn in ffns if ffn.output in state.region)
            yield f"{names or 'linear layers'}: no product left, in the table of token vectors"

    def left(self, ffns: Sequence[FeedForward]) -> Iterator[str]:
        """A sentence for each FFN that did not vanish."""
        for ffn in ffns:
            state = next((state for state in self.stream.states.values() if ffn.output in state.region), None)
            if ffn.activations:
                yield why_not_linear(ffn)
            elif state not in self.looked_up and (state not in self.parents or not state.skips[0][1].dim()):
                yield f"{name_of(ffn)}: {self._reason(state)}"

    def _reason(self, state: State | None) -> str:
        if state is None or len(state.skips) != 1:
            return "no residual connection that a basis could follow"
        if not state.skips[0][1].dim():
            return "reads a norm, or something else that is not linear in the residual stream"
        if state in self.rewritten:
            return "one product is left, where the basis starts anew: its condition would be too large otherwise"
        return "the condition of its basis would be too large"


def _chains(stream: ResidualStream) -> Iterator[list[State]]:
    """Runs of states that continue each other."""
    following = stream.linked()
    continued = set(following.values())
    for state in stream.states.values():
        chain = [state]
        while state not in continued and chain[-1].node in following:
            chain.append(following[chain[-1].node])
        if len(chain) > 1:
            yield chain
