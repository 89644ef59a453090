"""JAX → StableHLO → PPHLO: compile the live steps of a model for SecretFlow SPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.errors import AeroError, LoweringError
from aero_compile.runtime.arithmetic.constants import fixed_point
from aero_compile.runtime.arithmetic.squares import squares_by_exp
from aero_compile.runtime.lowering import warm_up
from aero_compile.runtime.lowering.live import LiveProgram, LiveStep
from aero_compile.runtime.program import Program
from aero_compile.runtime.program_parts import SET_UP, TOKENS, Step, TensorSpec
from aero_compile.runtime.spu_config import import_spu, plain_message


def compile_steps(live: LiveProgram, protocol: str, field: int, fraction_bits: int) -> Program:
    """Compile `live` into the program that both parties load.

    Raises:
        InputError: no approximation is as close as was asked for.
        LoweringError: SPU's compiler refuses an operator; the message names it and its place.
    """
    spu = import_spu()
    codes: dict[str, str] = {SET_UP: _compile(spu, warm_up.STEP, fraction_bits)}
    for step in live.steps:
        if step.key not in codes:
            codes[step.key] = _compile(spu, step, fraction_bits)
    last_use = {name: at for at, step in enumerate(live.steps) for name in (*step.inputs, *step.outputs)}
    last_use[live.result] = len(live.steps)
    if live.guard is not None:
        last_use[live.guard] = len(live.steps)
    kept = {TOKENS, *live.weights}  # inputs stay for the next run
    steps = tuple(
        Step(
            step.label,
            step.place,
            step.key,
            step.inputs,
            step.outputs,
            tuple(
                name
                for name in dict.fromkeys((*step.inputs, *step.outputs))
                if last_use[name] == at and name not in kept
            ),
        )
        for at, step in enumerate(live.steps)
    )
    return Program(
        protocol,
        field,
        fraction_bits,
        tuple(TensorSpec(name, array.shape, str(array.dtype)) for name, array in live.weights.items()),
        TensorSpec(TOKENS, live.token_shape, "int32"),
        TensorSpec(live.result, live.result_shape, "float32"),
        steps,
        codes,
        {"spu": str(spu.__version__)},
        live.guard,
    )


def _compile(spu: Any, step: LiveStep, fraction_bits: int) -> str:
    frontend, secret = spu.utils.frontend, spu.Visibility.VIS_SECRET
    arguments = [
        np.zeros(shape, np.int32 if dtype == "int32" else np.float32)
        for shape, dtype in zip(step.shapes, step.dtypes, strict=True)
    ]
    try:
        with squares_by_exp(), fixed_point(fraction_bits):
            executable, _ = frontend.compile(
                frontend.Kind.JAX,
                step.function,
                arguments,
                {},
                list(step.inputs),
                [secret] * len(step.inputs),
                lambda outputs: [f"out{i}" for i in range(len(outputs))],
            )
    except AeroError:
        raise
    except Exception as error:
        raise LoweringError(f"SPU cannot compile {step.label} (in {step.place}): {plain_message(error)}") from error
    code = executable.code
    return code.decode() if isinstance(code, bytes) else str(code)
