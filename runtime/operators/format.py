"""Valid ranges of every live operator: one row an operator, from which all range checks are made.

Every result must stay within what may be multiplied (`Format.limit`): that is checked of all operators alike, and a
row of `anywhere` says that it is enough. Other rows name what else an operator computes inside, and within which
ends it must lie for the operator to err by no more than is stated of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aero_compile.ir.custom_ops import HIDDEN_BELOW, length_normalized
from aero_compile.runtime.arithmetic.exponential import choose_power
from aero_compile.runtime.operators.products import NORM_GAIN
from aero_compile.runtime.spu_config import largest_value
from aero_compile.runtime.tolerances import DEFAULT, Tolerances


@dataclass(frozen=True)
class Format:
    """The fixed-point format, and the tolerances that choose how functions are computed."""

    ring_bits: int
    fraction_bits: int
    tolerances: Tolerances = DEFAULT

    @property
    def limit(self) -> float:
        """Largest magnitude that may come of a product or a sum of products, before it is truncated."""
        return largest_value(self.ring_bits, self.fraction_bits)

    @property
    def sum_limit(self) -> float:
        """Largest magnitude that a sum may have that is not multiplied: it only has to stay within the ring."""
        return 2.0 ** (self.ring_bits - self.fraction_bits - 3)

    @property
    def inverse_limit(self) -> float:
        """Largest argument of reciprocals, roots and logarithms (they normalize within 2f bits)."""
        return 2.0 ** (self.fraction_bits - 1)

    @property
    def least(self) -> float:
        """Smallest argument of the same: below it the rounding of the argument itself shows."""
        return 2.0 ** min(-6, 12 - self.fraction_bits)

    @property
    def largest_rounded(self) -> float:
        """Largest factor that may be multiplied with a rounded reciprocal: 64 times 3 units are 7e-4."""
        return 2.0 ** (self.fraction_bits - 12)

    @property
    def largest_mean(self) -> float:
        """Largest mean of a row that normalized attention weights are divided by: 256 times 3 units are 3e-3."""
        return 4 * self.largest_rounded

    @property
    def least_deviation(self) -> float:
        """Smallest root of variance and eps of a row whose elements are off by two units: below 0.8 % of it."""
        return 2.0 ** (8 - self.fraction_bits)

    @property
    def least_variance(self) -> float:
        """Smallest variance whose inverse root a norm takes: four units less or more of it change that by 0.2 %."""
        return 2.0 ** (10 - self.fraction_bits) / NORM_GAIN


@dataclass(frozen=True)
class Quantity:
    """Something that an operator computes inside: it must lie between `low` and `high`.

    `of` computes it, or every value of it, in PyTorch from the operator's arguments by the names of its schema.
    """

    what: str
    low: float
    high: float
    of: Callable[[Mapping[str, Any]], Tensor]


Row = Callable[[Format, Mapping[str, Any], Collection[str]], tuple[Quantity, ...]]
"""From the format, an operator's arguments by name (`self` is `x`), and the names of those that are public."""


def anywhere(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    """Nothing inside: the operator holds for all values whose result may be multiplied."""
    return ()


def _argument(low: float, high: float, what: str = "argument") -> Quantity:
    return Quantity(what, low, high, lambda given: given["x"].double())


def _magnitude(low: float, high: float, what: str, name: str = "x") -> Quantity:
    return Quantity(what, low, high, lambda given: torch.as_tensor(given[name]).double().abs())


def _root(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return (_argument(form.least, form.inverse_limit),)


def _reciprocal(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return (_magnitude(form.least, form.inverse_limit, "divisor"),)


def _div(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    if not isinstance(given["other"], Tensor) or "other" in public:
        return ()
    found = (_magnitude(form.least, form.inverse_limit, "divisor", "other"),)
    if given["other"].numel() >= torch.as_tensor(given["x"]).numel():
        return found

    def smaller(given: Mapping[str, Any]) -> Tensor:
        return torch.minimum(*(torch.as_tensor(given[name]).double().abs() for name in ("x", "other")))

    # One rounded reciprocal for many dividends: what it is off by is multiplied with them.
    return (*found, Quantity("smaller of dividend and divisor", 0.0, form.largest_rounded, smaller))


def _pow(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    exponent = given.get("exponent")
    if exponent in (0.5, -0.5):
        return _root(form, given, public)
    if exponent == -1:
        return (_magnitude(form.least, form.inverse_limit, "base"),)
    if exponent == -2:
        return (_magnitude(math.sqrt(form.least), math.sqrt(form.inverse_limit), "base"),)
    return ()


def _exp(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    power = choose_power(form.tolerances.exp)
    return (_argument(power.lowest, power.highest),)


def _exp2(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    power = choose_power(form.tolerances.exp)
    return (_argument(power.lowest / math.log(2), power.highest / math.log(2)),)


def _log1p(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return (_argument(form.least - 1, form.inverse_limit - 1),)


def _by_rate(form: Format, rate: float) -> tuple[Quantity, ...]:
    """Of an activation that looks at rate·x: it must be as small as what is multiplied."""
    return (_argument(-form.limit / rate, form.limit / rate),) if rate > 1 else ()


def _softplus(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _by_rate(form, float(given["beta"]))


def _elu(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _by_rate(form, float(given["input_scale"]))


def _celu(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _by_rate(form, abs(1 / float(given["alpha"])))


LEAST_DEVIATION = "deviation of a row, root of variance and eps"
LEAST_VARIANCE = "smallest variance and eps (over the size of the result)"


def row_variances(given: Mapping[str, Any], name: str) -> Tensor:
    """Mean square of each row that a norm takes; of one that takes the mean off, its variance."""
    x: Tensor = given["input"].double()
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    x = x - x.mean(dims, keepdim=True) if name == "aten.layer_norm" or given.get("centered") else x
    return x.square().mean(dims)


def eps_of(given: Mapping[str, Any]) -> float:
    """eps of a norm, on the scale of variances; PyTorch's RMSNorm takes that of the format for None."""
    eps = given.get("eps")
    if "form" in given:  # beside the root
        return float(given["eps"]) ** 2
    return float(torch.finfo(given["input"].dtype).eps if eps is None else eps)


def rooted(variances: Tensor, eps: float) -> Tensor:
    """Variance and eps of each row over the size of its results: small rows give small results, however they err."""
    return (variances + eps) ** 1.5 / variances.sqrt()


@dataclass(frozen=True)
class SmallRows:
    """How small the rows of a norm may be, in units of the variance that it computes: 4^doublings times the rows' own.

    `deviation` and `root` are the least values of `LEAST_DEVIATION` and `LEAST_VARIANCE`.
    """

    eps: float
    deviation: float
    root: float

    @classmethod
    def of(cls, form: Format, given: Mapping[str, Any], doublings: int = 0, folded: bool = False) -> SmallRows:
        """Those of a norm with these arguments, `doublings` of its rows, or (`folded`) of the weights before."""
        by_weights = 0 if folded else doublings
        return cls(4.0**doublings * eps_of(given), 2.0**by_weights * form.least_deviation, form.least_variance)

    def hold(self, variances: Tensor) -> bool:
        """Whether the norm holds for rows of all these variances."""
        large = (variances + self.eps).sqrt() >= self.deviation
        return bool((large & (rooted(variances, self.eps) >= self.root)).all())

    @property
    def least(self) -> float:
        """Variance from which on rows hold; 0 if all do, because of eps."""
        by_rounding = max(0.0, self.deviation**2 - self.eps)
        # (v + eps)^1.5 / √v is least at v = eps / 2 and grows from there on; at v = root it is no less than root.
        low, high = self.eps / 2, self.root
        if 1.5 * math.sqrt(3.0) * self.eps >= self.root:
            return by_rounding
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (middle + self.eps) ** 1.5 < self.root * math.sqrt(middle) else (low, middle)
        return max(by_rounding, high)


def _norm(form: Format, given: Mapping[str, Any], name: str) -> tuple[Quantity, ...]:
    gain = 4.0 ** given.get("doublings", 0)
    eps = eps_of(given)
    finer = 2.0 ** given.get("doublings", 0) if given.get("folded") else 1.0

    def variances(given: Mapping[str, Any]) -> Tensor:
        return row_variances(given, name)

    def sums(given: Mapping[str, Any]) -> Tensor:
        total: Tensor = variances(given) * math.prod(given["normalized_shape"])
        return total

    return (
        Quantity("sum of squares", 0.0, form.limit / gain, sums),
        Quantity("variance", 0.0, form.inverse_limit / NORM_GAIN / gain, variances),
        Quantity(
            LEAST_DEVIATION,
            form.least_deviation / finer,
            math.inf,
            lambda given: (variances(given) + eps).sqrt(),
        ),
        Quantity(
            LEAST_VARIANCE,
            form.least_variance / gain,
            math.inf,
            lambda given: rooted(variances(given), eps),
        ),
    )


def _layer_norm(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _norm(form, given, "aten.layer_norm")


def _rms_norm(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _norm(form, given, "aten.rms_norm")


def _deviation_norm(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    return _norm(form, given, "deviation_norm")


LARGEST_POWER = "power of a score"
MEAN_POWER = "mean of a row's powers, and eps"


def _attention_weights(form: Format, given: Mapping[str, Any], public: Collection[str]) -> tuple[Quantity, ...]:
    if given["kind"] in ("sigmoid", "sink"):
        return ()
    arguments = given["kind"], given["power"], given["scale"], given["shift"]

    def powers(given: Mapping[str, Any]) -> Tensor:
        scores: Tensor = given["x"].double()
        return length_normalized(scores, given["dim"], *arguments)

    found = (Quantity(LARGEST_POWER, 0.0, form.limit, powers),)
    if given["kind"] == "relu":
        return found

    def means(given: Mapping[str, Any]) -> Tensor:
        found: Tensor = powers(given).sum(given["dim"]) + given["eps"]
        return found[(given["x"] > HIDDEN_BELOW).any(given["dim"])]

    return (*found, Quantity(MEAN_POWER, form.least, form.largest_mean, means))


_ANYWHERE = """
add sub rsub mul neg abs square relu leaky_relu prelu gelu silu sigmoid tanh maximum minimum clamp clamp_min clamp_max
hardtanh hardswish hardsigmoid hardshrink softshrink mish selu log_sigmoid
masked_fill where sum mean amax amin gt lt ge le linear matmul embedding softmax
reshape flatten unflatten transpose t permute unsqueeze squeeze expand expand_as repeat repeat_interleave
slice select index index_select constant_pad_nd flip roll cat stack split split_with_sizes chunk unbind
alias detach to _to_copy type_as
"""

LIMITS: dict[str, Row] = {
    **{f"aten.{name}": anywhere for name in _ANYWHERE.split()},
    **dict.fromkeys(("getitem", "dropout"), anywhere),
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
    "deviation_norm": _deviation_norm,
    **dict.fromkeys(("aten.sqrt", "aten.rsqrt", "aten.log"), _root),
    "aten.reciprocal": _reciprocal,
    "aten.div": _div,
    "aten.pow": _pow,
    **dict.fromkeys(("aten.exp", "aten.expm1"), _exp),
    "aten.exp2": _exp2,
    "aten.log1p": _log1p,
    "aten.softplus": _softplus,
    "aten.elu": _elu,
    "aten.celu": _celu,
    "attention_weights": _attention_weights,
}
"""The row of every live operator, by the name it is registered under."""
