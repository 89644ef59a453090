"""Parts of a compiled program: inputs of each party, steps, opened results, and the runs of its kernels.

A kernel runs on the words of shares, as one party or in a rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from aero_compile.errors import LoweringError
from aero_compile.runtime.kernels.cached_product import CachedProduct
from aero_compile.runtime.kernels.client_product import ClientProduct
from aero_compile.runtime.kernels.encrypted_lookup import EncryptedLookup
from aero_compile.runtime.kernels.kernel import Kernel
from aero_compile.runtime.kernels.registry import to_json
from aero_compile.runtime.kernels.share_words import widened
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.values import Values
from aero_compile.runtime.online.plan import SharePlan, plan_of
from aero_compile.runtime.program.client_prefix import PrefixStep
from aero_compile.runtime.roles import CLIENT, SERVER

TOKENS = "tokens"
"""Name of the client's tokens as an input: a one-hot matrix, [B, T, V]."""

SET_UP = "set-up"
"""Key of the code, and name of the result, of the computation that only sets both parties up (see `warm_up`)."""

SET_UP_SIDE, PREPARED_SIDE = 256, 64
"""Rows and columns of its operands: 65,536 elements occupy every worker of SPU's tiled protocols, 4,096 one of them,
which is what a prepared run has (`ProgramContent.workers`)."""


@dataclass(frozen=True)
class TensorSpec:
    """An input of the program: its name, shape and dtype ("float32", or "int32" for the one-hot tokens)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def set_up_inputs(side: int) -> tuple[TensorSpec, ...]:
    """The inputs of the set-up, one of each party."""
    return tuple(TensorSpec(f"set-up:{rank}", (side, side), "float32") for rank in (SERVER, CLIENT))


@dataclass(frozen=True)
class Step:
    """One operator of the model, or a piece of one: runs `code` on named secret values; `free` ends the life of some.

    `continues`: it belongs to the operator of the step before. `on_shares`: the parties compute it on their shares
    by themselves (`aero_compile.runtime.online`), not in SPU.
    """

    label: str
    place: str
    code: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    free: tuple[str, ...]
    continues: bool = False
    on_shares: bool = False


@dataclass(frozen=True)
class KernelStep:
    """What the parties compute from the words of their shares (see `aero_compile.runtime.kernels`).

    `shapes` are those of the inputs. `preparation`: key of the code that computes, from random words, what the kernel
    needs of the time before the tokens are known, if it does. `continues`: it belongs to the operator of the step
    before.
    """

    label: str
    place: str
    kernel: Kernel
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    free: tuple[str, ...]
    continues: bool = False
    preparation: str = ""

    @property
    def encrypted(self) -> str:
        """Name of the encrypted table or matrix that the kernel takes; "" if it takes none.

        A table that is looked up may be multiplied with, too, and a matrix from either side: each is encrypted apart.
        """
        if isinstance(self.kernel, ClientProduct):
            return f"{self.inputs[1]}:{'rows' if self.kernel.transposed else 'columns'}"
        return self.inputs[1] if isinstance(self.kernel, EncryptedLookup) else ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "kernel": to_json(self.kernel)}


@dataclass(frozen=True)
class ClientMatrix:
    """A matrix of the server that clients hold encrypted: the weight, or its transpose, [inner, columns]."""

    weight: str
    transposed: bool
    inner: int
    columns: int


def _is_own(step: Step | KernelStep, at: int) -> bool:
    """True if a step reads its input with this number as words of the server's."""
    return isinstance(step, KernelStep) and at in step.kernel.of_server


def _client_matrix(step: KernelStep) -> ClientMatrix:
    assert isinstance(step.kernel, ClientProduct)
    turned = step.kernel.transposed
    return ClientMatrix(step.inputs[1], turned, step.kernel.inner, step.shapes[1][not turned])


@dataclass(frozen=True)
class ProgramContent:
    """A model compiled for one batch size and sequence length, for one protocol configuration.

    The server's inputs are `weights`, the client's the one-hot `tokens`, where a step reads them, and `clients`, which
    it computes in the clear by `prefix`. Both hold the arrays `published`, of which `published_digest` is the SHA-256
    ("" where there are none).

    `codes` maps a key to PPHLO text; identical operators share one, and `codes[SET_UP]` is the computation that
    only sets the parties up. `tokens` has shape [B, T, V], `logits` shape [B, T, V], or [B, 1, V] for the last
    position alone. `guard` names the value [1] that both parties open before the logits: 1 if a value left the range
    on which an operator holds. Nothing in it depends on any tokens, and on the weights only as far as bounds of them
    decide what is checked, and calibration how an exponential is computed.

    A step of a generation also takes `cached`, which exist as shares alone, and leaves `results` in their places, in
    the same order. Of the inputs in `by_position`, weights or published, the parties hold values for all positions,
    [positions, ...], and give one. Where it does not open its logits (`opens`), `logits` is the last of the results.
    """

    protocol: str
    field: int
    fraction_bits: int
    weights: tuple[TensorSpec, ...]
    tokens: TensorSpec
    logits: TensorSpec
    steps: tuple[Step | KernelStep, ...]
    codes: dict[str, str]
    versions: dict[str, str]
    guard: str | None = None
    published: tuple[TensorSpec, ...] = ()
    published_digest: str = ""
    prefix: tuple[PrefixStep, ...] = ()
    clients: tuple[TensorSpec, ...] = ()
    cached: tuple[TensorSpec, ...] = ()
    results: tuple[str, ...] = ()
    by_position: tuple[str, ...] = ()
    opens: bool = True

    @property
    def positions(self) -> int:
        """How many positions there are values for; 0 where nothing follows from the position."""
        return next((spec.shape[0] for spec in (*self.weights, *self.published) if spec.name in self.by_position), 0)

    def given(self, spec: TensorSpec) -> TensorSpec:
        """A weight or a published array as steps read it: of those by position one value."""
        return replace(spec, shape=spec.shape[1:]) if spec.name in self.by_position else spec

    @property
    def reads_tokens(self) -> bool:
        """Whether a step reads the one-hot tokens."""
        return any(self.tokens.name in step.inputs for step in self.steps)

    @property
    def shared_inputs(self) -> tuple[TensorSpec, ...]:
        """The published arrays that steps read."""
        read = {name for step in self.steps for name in step.inputs}
        return tuple(spec for spec in self.published if spec.name in read)

    @property
    def is_prepared(self) -> bool:
        """Whether a run takes what was made before its tokens were known, for it alone."""
        calls = [step for step in self.steps if isinstance(step, KernelStep) and not step.kernel.for_text]
        return any(step.preparation for step in calls) or bool(self.correlations)

    @property
    def set_up_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of its set-up, by the code of that, which is of one of two sizes."""
        small = f"tensor<{PREPARED_SIDE}x{PREPARED_SIDE}x" in self.codes[SET_UP].partition("->")[0]
        return set_up_inputs(PREPARED_SIDE if small else SET_UP_SIDE)

    @property
    def workers(self) -> int:
        """Parts of a bitwise protocol that SPU runs side by side (`runtime_config`); 0: as many as cores.

        One where runs are prepared: sessions of generations are long, and each worker holds memory all the time.
        """
        return int(self.is_prepared)

    @cached_property
    def share_plans(self) -> dict[str, SharePlan]:
        """Plans of the codes of the steps on shares, by their keys.

        Raises:
            LoweringError: one of them needs SPU.
        """
        found = {}
        for step in self.steps:
            if isinstance(step, Step) and step.on_shares and step.code not in found:
                plan = plan_of(self.codes[step.code], self.fraction_bits)
                if plan is None:
                    raise LoweringError(f"{step.label} ({step.place}) cannot be computed on shares")
                found[step.code] = plan
        return found

    @cached_property
    def correlations(self) -> dict[int, dict[str, int]]:
        """Elements of each kind of correlated randomness that steps take, by the numbers of steps that take any."""
        found = {at: self._correlations(step) for at, step in enumerate(self.steps)}
        return {at: taken for at, taken in found.items() if taken}

    def _correlations(self, step: Step | KernelStep) -> dict[str, int]:
        if isinstance(step, KernelStep):
            return step.kernel.correlations(*step.shapes)
        return dict(self.share_plans[step.code].correlations) if step.on_shares else {}

    @property
    def cached_products(self) -> dict[str, int]:
        """The products with cached rows, for which a text is prepared as a whole: numbers of their steps, by site."""
        calls = [(at, step.kernel) for at, step in enumerate(self.steps) if isinstance(step, KernelStep)]
        return {kernel.site: at for at, kernel in calls if isinstance(kernel, CachedProduct)}

    @cached_property
    def multiplied(self) -> frozenset[str]:
        """Weights of which kernels alone need the server's words, so that SPU does not hold them."""
        weights = {spec.name for spec in self.weights} - {*self.by_position}
        read = [(step, at, name) for step in self.steps for at, name in enumerate(step.inputs) if name in weights]
        return frozenset(name for _, _, name in read) - {name for step, at, name in read if not _is_own(step, at)}

    @property
    def looked_up(self) -> dict[str, tuple[int, ...]]:
        """The tables that are looked up under encryption, with their shapes."""
        calls = [step for step in self.steps if isinstance(step, KernelStep)]
        return {step.inputs[1]: step.shapes[1] for step in calls if isinstance(step.kernel, EncryptedLookup)}

    @property
    def client_weights(self) -> dict[str, ClientMatrix]:
        """The matrices that clients multiply with, encrypted, by `KernelStep.encrypted`."""
        calls = [step for step in self.steps if isinstance(step, KernelStep) and isinstance(step.kernel, ClientProduct)]
        return {step.encrypted: _client_matrix(step) for step in calls}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that it runs, each once, in the order in which it does first."""
        return tuple(dict.fromkeys(step.kernel for step in self.steps if isinstance(step, KernelStep)))


def run_kernel(side: Side, values: Values, step: KernelStep) -> None:
    """Run `step` as one party, on its `values`.

    A value that one party knows is a sum as well: its own number, and zero at the other.

    Raises:
        PartyError: an argument is not a sum of two numbers in the 64-bit ring.
    """
    found = step.kernel.run(side, *(_argument(side, values, step, at) for at in range(len(step.inputs))))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        values.put(name, result, words)


def _argument(side: Side, values: Values, step: KernelStep, at: int) -> Any:
    kernel, name = step.kernel, step.inputs[at]
    if at in kernel.unread:
        return np.zeros(0, np.uint64)
    if at in kernel.of_server and side.weight is not None:
        weight = side.weight(name)
        return weight if at in kernel.as_integers else widened(weight)
    return values.words(name)


def rehearse_kernel(values: Values, step: KernelStep, draw: np.random.Generator) -> None:
    """Run `step` on `values` of a rehearsal."""
    found = step.kernel.together(draw, *(values.words(name) for name in step.inputs))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        values.put(name, result, words)
