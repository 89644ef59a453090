"""Captured decoders into which something is put that no family computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from aero_compile.inference_model import InferenceModel, inference_copy
from aero_compile.ir.dataflow import tainted_nodes
from aero_compile.ir.rewriter import Rewriter
from tests.support.tiny_models import captured

aten = torch.ops.aten


def edited(edit: Callable[[Rewriter, fx.Node], fx.Node]) -> InferenceModel:
    """A GPT-2 whose token vectors go through `edit`."""
    model = inference_copy(captured("gpt2-eager"))
    live = tainted_nodes(model.graph, model.convention.tokens)
    node = next(n for n in model.graph.nodes if n in live and n.target is aten.embedding.default)
    change = Rewriter.after(node, like=node)
    new = edit(change, node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user > new)
    model.graph_changed()
    return model
