"""The bill of a step that is computed on shares."""

from __future__ import annotations

from aero_compile.runtime.costs.operations import PUBLIC, SHARED
from aero_compile.runtime.costs.session import Session
from aero_compile.runtime.online.plan import SharePlan

STEP, TRUNCATION = "StepOnShares", "Truncation"
"""Names in the cost table of the seconds of a step for each element of its operations, and of truncations."""


def bill_on_shares(session: Session, plan: SharePlan) -> tuple[str, ...]:
    """Bill a run; returns who knows its results."""
    operations = [each for each in plan.function.operations if each.result not in plan.constants]
    session.kernel(STEP, sum(each.gives.size for each in operations), 0)
    for elements in plan.truncations:
        session.swap(-(-elements // 8))
        session.kernel(TRUNCATION, elements, 0)
    return tuple(SHARED if each.secret else PUBLIC for each in plan.function.gives)
