"""Where a node comes from in the source model."""

from __future__ import annotations

from torch import fx


def source_path(node: fx.Node) -> str:
    """Name of the source module that `node` was captured from (`transformer.h.0.mlp`), or an empty string."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else str(node.meta.get("path", ""))


def place(node: fx.Node) -> str:
    """Where `node` is, for error messages."""
    path = source_path(node)
    return f"{node.name} in {path}" if path else node.name


def copy_place(source: fx.Node, target: fx.Node) -> None:
    """Let `target` be reported at the place of `source`."""
    for key in ("nn_module_stack", "path"):
        if key in source.meta:
            target.meta[key] = source.meta[key]
