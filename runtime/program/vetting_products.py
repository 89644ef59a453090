"""Check of a program's matrix products: neither party may show the other what it multiplies with.

The server writes the program, so the client checks it like the rest (`vetting`). Values are followed from the inputs,
each with all parties that may know it: SPU leaves what follows from one party's values with that party after some
operations, and makes shares of it after others. A product is taken only if it shows nothing in all of these cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

from aero_compile.errors import AeroError, InputError
from aero_compile.runtime.arithmetic.evaluators import Evaluation, evaluations
from aero_compile.runtime.arithmetic.ring import WORD
from aero_compile.runtime.costs.ciphertexts import Dims
from aero_compile.runtime.costs.pphlo import Function, Operation, parse
from aero_compile.runtime.program.parts import KernelStep, ProgramContent, Step
from aero_compile.runtime.roles import CLIENT, ROLES, SERVER

PUBLIC, SHARES = -1, None
"""What both know, and what neither does; else the rank of the party that knows a value."""

Known = frozenset[int | None]
"""Who may know a value."""

_KEEPS_OWNER = frozenset(
    {
        "add",
        "broadcast",
        "concatenate",
        "dot",
        "dot_general",
        "multiply",
        "negate",
        "reduce",
        "reshape",
        "reverse",
        "slice",
        "spu.gather",
        "spu.prefer_a",
        "subtract",
        "transpose",
    }
)
"""Operations of which SPU leaves the result with the party that knows all operands; others may make shares of it."""

_MATRICES = frozenset({"dot", "dot_general"})


def check_products(program: ProgramContent) -> None:
    """Refuse a program with a product whose answers show the other party what a party multiplies with.

    Only Cheetah sends ciphertexts. Its products are known for the 64-bit ring alone.

    Raises:
        InputError: the step, the sizes, and who would show what.
    """
    if program.protocol != "cheetah":
        return
    known: dict[str, Known] = dict.fromkeys((spec.name for spec in program.cached), frozenset({SHARES}))
    known |= dict.fromkeys((spec.name for spec in program.published), frozenset({PUBLIC}))
    known |= dict.fromkeys((spec.name for spec in program.weights), frozenset({SERVER}))
    known |= dict.fromkeys((spec.name for spec in (program.tokens, *program.clients)), frozenset({CLIENT}))
    for number, step in enumerate(program.steps):
        try:
            found = _of_kernel(program, step) if isinstance(step, KernelStep) else _of_step(program, step, known)
        except AeroError as error:
            raise InputError(f"step {number} of the program ({step.label[:60]!r}) is refused: {error}") from error
        known |= dict(zip(step.outputs, found, strict=True))


def _of_step(program: ProgramContent, step: Step, known: Mapping[str, Known]) -> Sequence[Known]:
    return _checked(program, step.code, tuple(known[name] for name in step.inputs))


def _of_kernel(program: ProgramContent, step: KernelStep) -> Sequence[Known]:
    """Return who knows the results of a kernel; check what is prepared for it, of random words and weights."""
    found = step.kernel.preparation(*step.shapes)
    if found is not None:
        owners = (*(each.owner for each in found.randoms), *[SERVER] * len(found.weights))
        _checked(program, step.preparation, tuple(frozenset({owner}) for owner in owners))
    return [frozenset({each.owner}) for each in step.kernel.results(*step.shapes)]


def _checked(program: ProgramContent, key: str, arguments: tuple[Known, ...]) -> Sequence[Known]:
    function = _parsed(program.codes[key])
    values = dict(zip(function.arguments, arguments, strict=True))
    for operation in function.operations:
        operands = [values[name] for name in operation.operands]
        if operation.kind in _MATRICES:
            _check(program, operation, *operands)
        values[operation.result] = _after(operation, operands)
    return [values[name] for name in function.results]


@lru_cache(maxsize=4096)
def _parsed(code: str) -> Function:
    return parse(code)


def _after(operation: Operation, operands: Sequence[Known]) -> Known:
    """Return the parties that may know the result of an operation."""
    owners = frozenset[int | None]().union(*operands) - {PUBLIC, SHARES}
    mixes = operation.kind == "concatenate" and len({each == {PUBLIC} for each in operands}) > 1
    adds = operation.kind != "reduce" or operation.reducer == "add"
    stays = operation.kind in _KEEPS_OWNER and adds and not mixes
    found = {owner for owner in owners if all(each & {owner, PUBLIC} for each in operands)}
    if all(PUBLIC in each for each in operands):
        found |= {PUBLIC}
    certain = stays and len(owners) == 1 and all(each <= {*owners, PUBLIC} for each in operands)
    is_public = not owners and not operation.gives.secret and not any(SHARES in each for each in operands)
    return frozenset(found if certain or is_public else {*found, SHARES})


def _check(program: ProgramContent, operation: Operation, lefts: Known, rights: Known) -> None:
    """Refuse a product that would show something if these parties know its factors."""
    dims = _dims(operation)
    for left, right in product(lefts, rights):
        if 0 in dims or PUBLIC in (left, right) or (left == right and left is not SHARES):
            continue  # nothing is sent
        if program.field != WORD:
            raise InputError(
                f"it multiplies matrices {_text(dims)} in a {program.field}-bit ring of Cheetah, whose answers are not "
                f"known to hide what a party multiplies with; compile it with field={WORD}"
            )
        for found in evaluations(dims, left, right):
            if not found.is_hidden:
                raise InputError(_reason(found, dims))


def _dims(operation: Operation) -> Dims:
    left, right = (each.shape for each in operation.takes)
    if operation.kind == "dot_general":
        if operation.contraction != ((0,), (0,), (2,), (1,)):
            raise InputError(f"its batched matrix product has another form: {operation.text[:100]}")
        return left[1], left[2], right[2]
    if not left or not right or left[-1] != right[0]:
        raise InputError(f"its matrix product has another form: {operation.text[:100]}")
    return math.prod(left[:-1]), left[-1], math.prod(right[1:])


def _reason(found: Evaluation, dims: Dims) -> str:
    who, other = ROLES[found.evaluator], ROLES[1 - found.evaluator]
    what = "its share" if found.owner is SHARES else "its own input"
    return (
        f"in its product of matrices {_text(dims)} the {who} would multiply {what} with ciphertexts and send "
        f"{found.answers} answers, from which the {other} can tell which blocks are equal"
    )


def _text(dims: Dims) -> str:
    m, k, n = dims
    return f"{m}×{k} and {k}×{n}"
