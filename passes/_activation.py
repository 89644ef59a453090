"""What the passes that replace FFN activations share."""

from __future__ import annotations

from torch import fx

from aero_compile.errors import UnsupportedGraphError
from aero_compile.parts import ACTIVATIONS
from aero_compile.rewriting import place
from aero_compile.structure import require_ffns
from aero_compile.trainable import TransformedModel


def ffn_activations(model: TransformedModel, name: str) -> list[fx.Node]:
    """Activation nodes of all FFNs, in layer order.

    Raises:
        UnsupportedGraphError: no FFN, or an activation outside every FFN that was recognized.
    """
    structure = model.structure
    found = [node for ffn in require_ffns(structure, name) for node in ffn.activations]
    inside = set(found)
    for node in structure.live - inside:
        if ACTIVATIONS.get(node.target, "tanh") not in ("tanh", "sigmoid"):
            raise UnsupportedGraphError(
                f"{name} found the activation {ACTIVATIONS[node.target]} at {place(node)} outside every "
                "feed-forward block; supported are blocks of linear layers added to the residual stream"
            )
    gates = [n for n in found if ACTIVATIONS[n.target] in ("tanh", "sigmoid")]
    if gates:
        raise UnsupportedGraphError(
            f"{name} does not know the activation around {place(gates[0])} ({ACTIVATIONS[gates[0].target]}); "
            "supported are " + ", ".join(sorted(set(ACTIVATIONS.values()) - {"tanh", "sigmoid"}))
        )
    return found
