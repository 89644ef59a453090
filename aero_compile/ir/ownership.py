"""Who may know a value: both parties, the server alone, or nobody, since it follows from the tokens.

Of what a model holds (parameters, buffers of any type, constants, tensor attributes, what its modules hold) everything
is the server's but what is shown to be structure by what it holds (`aero_compile.ir.structural`). So what is public is
computed from shapes, literals and structure alone, and from inputs that both parties know.
"""

from __future__ import annotations

from enum import Enum

from torch import fx, nn

from aero_compile.ir.dataflow import dependents, fixed_nodes, tainted_nodes
from aero_compile.ir.structural import structural_attributes


class Domain(Enum):
    """Who may know a value."""

    PUBLIC = "public"
    SERVER = "server"
    LIVE = "live"


def domains_of(module: nn.Module, graph: fx.Graph, tokens: str) -> dict[fx.Node, Domain]:
    """The domain of every node of `graph`, which reads its tensors from `module`; no node is computed.

    `tokens` is the name of the input that only the client knows; shapes and all other inputs are public.
    """
    live, servers = tainted_nodes(graph, tokens), _servers(module, graph)
    return {
        node: Domain.LIVE if node in live else Domain.SERVER if node in servers else Domain.PUBLIC
        for node in graph.nodes
    }


def weight_nodes(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """The server's values that depend on no input, not even on its shape: weights, and what follows from them alone."""
    return fixed_nodes(graph) & _servers(module, graph)


def _servers(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on something that the server alone holds, and maybe on inputs, too."""
    structural = structural_attributes(module, graph)

    def is_held(node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(True for _ in module.get_submodule(str(node.target)).buffers())
        return node.op == "get_attr" and str(node.target) not in structural

    return dependents(graph, is_held)
