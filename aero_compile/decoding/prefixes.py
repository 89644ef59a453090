"""Whether the logits of a text are those of every longer text that begins with it."""

from __future__ import annotations

import torch

from aero_compile.errors import UnsupportedModelError
from aero_compile.inference_model import InferenceModel


@torch.no_grad()
def require_same_prefixes(model: InferenceModel, batch: int, length: int) -> None:
    """Compare the logits of random tokens `[batch, length]` with those of their first positions alone.

    They may differ by the square root of the precision of the weights, relative to the largest logit: rounding stays
    far below that, a scale or a mask that follows from the length does not. Lengths tried are 2, half and one less.
    A model whose graph is made for one shape cannot be asked.

    Raises:
        UnsupportedModelError: they differ; the message names the length.
    """
    if model.fixed_shape is not None:
        return
    weight = next(model.parameters())
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (batch, length), generator=draw).to(weight.device)
    logits = model(ids)
    allowed = torch.finfo(weight.dtype).eps ** 0.5 * float(logits.abs().max())
    for shorter in sorted({2, length // 2, length - 1} - {0, length}):
        off = float((model(ids[:, :shorter]) - logits[:, :shorter]).abs().max())
        if not off <= allowed:
            raise UnsupportedModelError(
                f"the logits of {shorter} tokens change by {off:.3g} when {length - shorter} tokens follow: something "
                "in the model follows from the length of the text, so earlier positions cannot be kept for later ones. "
                "Compute the logits of all positions (private_inference) instead"
            )
