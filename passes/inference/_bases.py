"""Choose the bases of the residual stream in which linear layers along it vanish, and where they are restarted.

Along a chain of values x_{j+1} = x_j·S_j + …, bases R_j = S_j·R_{j+1} make z_j = x_j·R_j obey z_{j+1} = z_j + …: no
product is left. A *segment* is a run of values with such bases. Its freedom is one matrix: R is a multiple of the
identity at its *anchor* m, so that R_j = S_j···S_{m−1} before it and R_j = (S_m···S_{j−1})⁻¹ behind it.

What bounds a segment is the fixed point: an error of z_j is one of x_j times R_j⁻¹, and values and weights of z_j are
those of x_j times R_j. For errors of equal size in all directions the root mean squares of these factors are
‖R‖_F/√d and ‖R⁻¹‖_F/√d. The largest of the one times the largest of the other is the *condition* of a segment: 1 if
every R_j is orthogonal. Where no basis has to stay as it is, a segment is scaled so that both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aero_compile.analysis.affine import times
from aero_compile.analysis.residual_stream import Basis


@dataclass(frozen=True)
class Segment:
    """Values `first` … `last` of a chain, in bases that are a multiple of the identity at `anchor`."""

    first: int
    last: int
    anchor: int
    condition: float
    scale: float

    def bases(self, steps: Sequence[Tensor]) -> dict[int, Basis]:
        """R and R⁻¹ of each value; `steps` are the S of the whole chain."""
        one = torch.ones_like(steps[0].flatten()[0])
        found = {self.anchor: (one * self.scale, one / self.scale)}
        for j in range(self.anchor - 1, self.first - 1, -1):
            matrix, inverse = found[j + 1]
            found[j] = times(steps[j], matrix), times(inverse, invert(steps[j]))
        for j in range(self.anchor, self.last):
            matrix, inverse = found[j]
            found[j + 1] = times(invert(steps[j]), matrix), times(inverse, steps[j])
        return found


def invert(matrix: Tensor) -> Tensor:
    """The inverse of a float64 matrix, or of a number; not finite where there is none."""
    if matrix.dim() == 0:
        return 1 / matrix
    inverse, failed = torch.linalg.inv_ex(matrix)
    return inverse if int(failed) == 0 else torch.full_like(matrix, math.inf)


def size(matrix: Tensor) -> float:
    """Root mean square of the factors by which a matrix changes lengths: ‖·‖_F/√d; infinite if it is no number."""
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    found = norm / math.sqrt(len(matrix)) if matrix.dim() else norm
    return found if math.isfinite(found) else math.inf


def find_segments(steps: Sequence[Tensor], fixed: Sequence[bool], largest: float) -> list[Segment]:
    """Cut a chain of values into as few segments as `largest`, the bound of their condition, allows.

    Args:
        steps: S_j between value j and the next, float64 `[d, d]`, or 0-dimensional for multiples of the identity.
        fixed: for each value whether its basis must stay as it is; one more than steps.
        largest: the largest condition of a segment.
    """
    segments: list[Segment] = []
    start = 0
    while start < len(fixed):
        segment = _longest(steps, fixed, start, largest)
        segments.append(segment)
        start = segment.last + 1
    return segments


def _longest(steps: Sequence[Tensor], fixed: Sequence[bool], start: int, largest: float) -> Segment:
    """The longest segment from `start` on; it ends at a matrix that is no multiple of the identity, if it must end."""
    pairs = _Pairs(start)
    best = [Segment(start, start, start, 1.0, 1.0)]
    for last in range(start + 1, len(fixed)):
        pairs.extend(steps[last - 1])
        longer = pairs.best_anchor(fixed)
        if longer is None or not (longer.condition <= largest and math.isfinite(longer.condition)):
            break
        best.append(longer)
    else:
        return best[-1]
    cuts = [segment for segment in best if steps[segment.last].dim()]
    return cuts[-1] if cuts else best[-1]


class _Pairs:
    """Sizes of the products S_j···S_{m−1}, and of their inverses, for all pairs of values from `start` on.

    So many matrices are multiplied for their sizes alone: float32 is close enough there, in half the time.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.products: list[tuple[Tensor, Tensor]] = []
        self.sizes: dict[tuple[int, int], tuple[float, float]] = {(start, start): (1.0, 1.0)}
        self.same: set[tuple[int, int]] = set()
        self.last = start

    def extend(self, step: Tensor) -> None:
        inverse = invert(step)
        step, inverse = (each.float() if each.dim() else each for each in (step, inverse))
        one = torch.ones_like(step.flatten()[0])
        self.products = [(times(p, step), times(inverse, q)) for p, q in [*self.products, (one, one)]]
        self.last += 1
        self.sizes[self.last, self.last] = 1.0, 1.0
        for j, (product, back) in enumerate(self.products, self.start):
            self.sizes[j, self.last] = size(product), size(back)
            if product.dim() == 0 and float(product) == 1:
                self.same.add((j, self.last))

    def best_anchor(self, fixed: Sequence[bool]) -> Segment | None:
        """The segment up to the last value with the smallest condition; None if two fixed values exclude each other."""
        values = range(self.start, self.last + 1)
        kept = [j for j in values if fixed[j]]
        if any((kept[0], j) not in self.same for j in kept[1:]):
            return None
        found = []
        for anchor in kept[:1] or values:
            sizes = [self.sizes[j, anchor] for j in values if j <= anchor]
            sizes += [self.sizes[anchor, j][::-1] for j in values if j > anchor]
            grown, back = max(s for s, _ in sizes), max(s for _, s in sizes)
            scale = 1.0 if kept or not grown else math.sqrt(back / grown)
            found.append(Segment(self.start, self.last, anchor, grown * back, scale))
        return min(found, key=lambda segment: segment.condition)
