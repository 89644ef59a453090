"""What the passes that replace FFN activations share."""

from __future__ import annotations

from aero_compile.errors import UnsupportedGraphError
from aero_compile.parts import ACTIVATIONS, Activation
from aero_compile.rewriting import place
from aero_compile.structure import require_ffns
from aero_compile.trainable import TransformedModel


def ffn_activations(model: TransformedModel, name: str) -> list[Activation]:
    """Activations of all FFNs, in layer order.

    Raises:
        UnsupportedGraphError: no FFN, or an activation outside every FFN that was recognized.
    """
    structure = model.structure
    found = [activation for ffn in require_ffns(structure, name) for activation in ffn.activations]
    inside = {node for activation in found for node in activation.nodes}
    for node in structure.values:
        kind = ACTIVATIONS.get(node.target) if node in structure.live - inside else None
        if kind not in (None, "tanh", "sigmoid"):
            raise UnsupportedGraphError(
                f"{name} found the activation {kind} at {place(node)} outside every feed-forward block; supported "
                "are blocks of two linear layers added to the residual stream"
            )
    return found
