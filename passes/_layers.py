"""The option that passes share which act on some layers."""

from __future__ import annotations

from dataclasses import dataclass

from aero_compile.analysis.selections import parse_layers
from aero_compile.graph_pass import GraphPass


@dataclass(frozen=True)
class LayersPass(GraphPass):
    """A pass that acts on some of the layers. Each names the option in its own text, for the page of recipes."""

    layers: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", parse_layers(self.layers))
