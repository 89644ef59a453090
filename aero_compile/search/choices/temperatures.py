"""temperatures: each layer's softmax temperatures, one for each head's positions: one for each head, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel
from aero_compile.passes.share_temperature import ShareTemperature, has_positions, log_temperatures, shared_log
from aero_compile.search.choices.attention import part_of
from aero_compile.search.sites import Choice, Decisions, GateInput, OptionPrice, Site, numbers

_OPTIONS = ("position", "head", "none")
_PRICES = (OptionPrice("position", 1), OptionPrice("one", 0), OptionPrice("one", 0))
"""One temperature for a head goes into rows of a weight: none at all saves no more."""


class Temperatures(Choice):
    """`share-temperature{layers=…,per=…}`, in layers whose temperatures differ between positions."""

    def sites(self, model: TransformedModel) -> tuple[Site, ...]:
        tables = log_temperatures(model)
        return tuple(
            Site("temperatures", str(each.layer), each.layer, "temperatures", _OPTIONS, _PRICES, acts_on=part_of(each))
            for each in model.structure.attentions
            if each.layer in tables and has_positions(model, tables[each.layer])
        )

    def put_gates(self, model: TransformedModel, sites: Sequence[Site], inputs: GateInput, measured: None) -> None:
        of_layer = {site.layer: site for site in sites}
        for layer, table in log_temperatures(model).items():
            if layer in of_layer:
                behind = Rewriter.after(table)
                behind.redirect(behind.call(_mixed, table, inputs.gates, inputs.starts[of_layer[layer]]))

    def passes(self, sites: Sequence[Site], decisions: Decisions) -> tuple[str, ...]:
        found = []
        for per in _OPTIONS[1:]:
            layers = [site.layer for site in sites if decisions.get(site) == per and site.layer is not None]
            if layers:
                found.append(str(ShareTemperature(layers=numbers(layers), per=per)))
        return tuple(found)


def _mixed(log_t: Tensor, gates: Tensor, start: int) -> Tensor:
    """log t of each position and that of the whole head, weighed; none is zero."""
    return gates[start] * log_t + gates[start + 1] * shared_log(log_t)
