"""Weights for models on the meta device, whose costs are asked for before there are any."""

from __future__ import annotations

import copy

import torch

from aero_compile.errors import InputError

GAINS = ("weight", "alpha", "beta")
"""What vectors are called that are multiplied with or divided by, in norms and scaled FFNs."""


def with_weights(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, or a copy with weights like those of a trained model in place of those on the meta device."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"an estimate takes a torch.nn.Module, not {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return model
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise InputError(
                f"the buffer {name} is on the meta device, and what it masks or rotates is not known; build the model "
                "under torch.device('cpu'), or move only its parameters to the meta device"
            )
    filled: dict[int, torch.nn.Parameter] = {}  # one for each parameter: what is tied stays tied
    empty = copy.deepcopy(model)
    for module in empty.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                if id(weight) not in filled:
                    filled[id(weight)] = torch.nn.Parameter(_like_trained(weight, name))
                module._parameters[name] = filled[id(weight)]
    empty.cpu()  # what a graph makes by itself, positions and masks, was made for the meta device
    return empty


def _like_trained(weight: torch.nn.Parameter, name: str) -> torch.Tensor:
    """Small numbers, none equal, around 1 for a gain or a scale: a rewriting that needs special weights finds none."""
    generator = torch.Generator().manual_seed(weight.numel())
    center = 1.0 if weight.dim() == 1 and name in GAINS else 0.0
    return torch.normal(center, 0.02, weight.shape, generator=generator).to(weight.dtype)
