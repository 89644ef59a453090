"""Orders in which the norms of a model can be taken out one at a time."""

from __future__ import annotations

from torch import nn

from aero_compile.analysis.norm_sites import find_norm_sites, parse_norms
from aero_compile.model import TransformedModel
from aero_compile.pipeline import transform


def removal_schedule(
    model: nn.Module,
    order: str = "ffn,qk,v,query,key,post-attention,post-ffn,other,final",
    pass_name: str = "strip-layer-norm",
) -> tuple[str, ...]:
    """Passes, as text, that take the norms of `model` one site at a time; each is valid after those before it.

    The default order is that of Heimersheim 2024 and Baroni et al. 2025 (`ln_2`, `ln_1` for queries and keys, `ln_1`
    for values, `ln_f`), with norms that GPT-2 does not have before the final one.

    Args:
        model: a TransformedModel, or any model that `transform` takes.
        order: names of parts, divided by commas; `attention` is one step a layer. Norms that are not named stay.
        pass_name: `strip-layer-norm`, `freeze-layer-norm` or `layer-norm-to-dyt`.

    Raises:
        RecipeError: an unknown name.
    """
    sites = find_norm_sites(model if isinstance(model, TransformedModel) else transform(model, "baseline"))
    steps: list[str] = []
    for name in order.replace(" ", "").split(","):
        parts = parse_norms(name)
        if "final" not in parts or len(parts) > 1:
            layers = sorted({s.norm.layer for s in sites if s.part in parts and s.norm.layer is not None})
            steps += [f"{pass_name}{{layers={layer},norms={name}}}" for layer in layers]
        if "final" in parts and any(site.part == "final" for site in sites):
            steps.append(f"{pass_name}{{norms=final}}")
    return tuple(dict.fromkeys(steps))
