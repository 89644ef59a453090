"""What one inference pass did, for the report of `optimize_for_inference`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """The result of one pass.

    Attributes:
        name: the pass, in kebab-case (`fold-norms`).
        modified: whether the graph or a weight changed.
        done: what was folded, fused or removed, a short sentence each.
        left: what could have been but was not, with the reason.
    """

    name: str
    modified: bool
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
