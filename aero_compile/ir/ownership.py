"""Who may know a value: both parties, one of them alone, or nobody, since it follows from the tokens and from weights.

Of what a model holds (parameters, buffers of any type, constants, tensor attributes, what its modules hold) everything
is the server's but what is shown to be structure by what it holds (`aero_compile.ir.structural`), and but the weights
that it gives to clients (`aero_compile.ir.published`). So what is public is computed from shapes, literals and
structure alone, and from inputs that both parties know.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx, nn

from aero_compile.ir.dataflow import dependents, fixed_nodes, tainted_nodes
from aero_compile.ir.ops import VIEWS, of_form
from aero_compile.ir.published import is_published
from aero_compile.ir.structural import structural_attributes

_LOOKUPS = of_form("embedding", "index")

CLIENT_OPS = (
    (VIEWS | _LOOKUPS | of_form("detach", "cast", "select", "cat", "stack", "sum", "negation", "scale", "linear"))
    | of_form("matmul")
    | {torch.ops.aten.layer_norm.default, torch.ops.aten.rms_norm.default}
)
"""What a client computes in the clear: the way from the tokens up to what only the server can go on with."""


class Domain(Enum):
    """Who may know a value.

    Both parties know PUBLIC values from the program, and PUBLISHED ones because the server gives the weights that they
    follow from to clients. A CLIENT value follows from these and the tokens; the client computes it alone.
    """

    PUBLIC = "public"
    PUBLISHED = "published"
    SERVER = "server"
    CLIENT = "client"
    LIVE = "live"


def domains_of(
    module: nn.Module, graph: fx.Graph, tokens: str, *shared: str, source: fx.Graph | None = None
) -> dict[fx.Node, Domain]:
    """The domain of every node of `graph`, which reads its tensors from `module`; no node is computed.

    `tokens` is the name of the input that only the client knows, `shared` those of inputs that nobody knows; shapes and
    all other inputs are public. `source`: the graph that `graph` was written from, where the latter has numbers of its
    own, such as lengths; they make no table of the model public.
    """
    live, given = tainted_nodes(graph, tokens, *shared), _given(module, graph)
    servers = _servers(module, graph, source)
    of_client = _clients(module, graph, live, given - servers, tokens)

    def domain(node: fx.Node) -> Domain:
        if node in live:
            return Domain.CLIENT if node in of_client else Domain.LIVE
        if node in servers:
            return Domain.SERVER
        return Domain.PUBLISHED if node in given else Domain.PUBLIC

    return {node: domain(node) for node in graph.nodes}


def weight_nodes(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """The server's values that depend on no input, not even on its shape: weights, and what follows from them alone."""
    return fixed_nodes(graph) & _servers(module, graph)


def server_nodes(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """All values that depend on something that the server alone holds, and maybe on inputs or their shapes, too."""
    return _servers(module, graph)


def given_nodes(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """What follows from weights that clients are given, and from none of the server's: rewritings leave it as it is.

    A rewriting that put a number of the server into such a weight would make a secret of it again, and cost what the
    gift saves.
    """
    return _given(module, graph) - _servers(module, graph)


def _given(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    return dependents(graph, lambda node: is_published(module, node))


def _servers(module: nn.Module, graph: fx.Graph, source: fx.Graph | None = None) -> set[fx.Node]:
    """Nodes whose value depends on something that the server alone holds, and maybe on inputs, too."""
    structural = structural_attributes(module, graph if source is None else source)

    def is_held(node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(True for _ in module.get_submodule(str(node.target)).buffers())
        return node.op == "get_attr" and str(node.target) not in structural and not is_published(module, node)

    return dependents(graph, is_held)


def _clients(module: nn.Module, graph: fx.Graph, live: set[fx.Node], given: set[fx.Node], tokens: str) -> set[fx.Node]:
    """Of the `given` values those that the client computes: rows of tables that it looks up, and what follows."""
    found: set[fx.Node] = set()
    ids: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in live:
            continue
        read = [each for each in node.all_input_nodes if each in live]
        is_tokens = node.op == "placeholder" and node.target == tokens
        if is_tokens or (read and node not in given and node.target in VIEWS and ids.issuperset(read)):
            ids.add(node)
        elif node in given and (_is_dropout(module, node) or node.target in CLIENT_OPS):
            if node.target in _LOOKUPS:
                goes_on = node.args[0] not in live and ids.issuperset(read)
            else:
                goes_on = found.issuperset(read)
            if goes_on:
                found.add(node)
    return found


def _is_dropout(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), nn.Dropout)
