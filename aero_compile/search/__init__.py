"""Search for the nonlinear operations that a model loses least by giving up, under a budget of a private forward.

What can be given up is listed in `choices`; a file of its own says for each kind of choice what the alternatives are,
how a recipe writes them, and how one program measures them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import aero_compile` loads no torch
    from torch import nn

    from aero_compile.runtime.costs.network import Network
    from aero_compile.search.result import SearchResult


def search(
    model: nn.Module,
    budget: str | float | None = None,
    seq_len: int | None = None,
    *,
    calibration: Any,
    held_out: Any = None,
    choices: Sequence[str] | None = None,
    order: str = "greedy",
    compare: Sequence[str] = (),
    network: str | Network = "loopback",
    logits: str = "all",
    probe_tokens: int = 1024,
    relaxation_steps: int = 60,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find which nonlinear operations to give up for the least loss under a budget.

    The model is not trained and not changed: losses are those of its weights as they are. The result's `recipe` is for
    `transform(model, recipe, calibration=calibration)`, and retraining makes up for much of what it costs.

    Args:
        model: as for `transform`, with weights; of a TransformedModel, what it still has is searched.
        budget: of a forward of one text: `"0.8 GB"`, `"40 s"` (on `network`), `"900 rounds"` or `"5000 messages"`, or a
            number of bytes. None: no recipe is chosen, the curve is by bytes.
        seq_len: tokens of the text that is priced; None: 128, or the model's positions if these are fewer.
        calibration: token ids int64 `[B, T]`, or an iterable of such batches, on which losses are measured.
        held_out: the same, on which the losses of the curve are measured as well; None: they are not.
        choices: kinds of choices, names of `aero_compile.search.choices.CHOICES`; None: norms, heads and activations.
        order: how what goes first is found: "greedy" (by loss for what it saves, measured again as others go),
            "single" (by the loss of each alone), "relaxation" (by weights of all alternatives, trained together),
            "entropy" (heads of the highest mean attention entropy first, for heads alone) or "random".
        compare: further orders, whose curves are in the result beside that of `order`.
        network: between the parties, as for `estimate`.
        logits: "all" positions or the "last", as for `estimate`.
        probe_tokens: about so many tokens of the calibration, evenly spread, decide what goes first; losses of the
            curve are of all of it.
        relaxation_steps: of training the weights of "relaxation".
        seed: of "random"; the other orders draw nothing.
        state: a file that keeps every measurement; a search that was stopped goes on from it.
        say: takes lines of progress; None: silent.

    Raises:
        InputError: a budget that cannot be read or reached (the message has the least that can), text that the model
            cannot take, an unknown choice or order, or a state of another search.
        UnsupportedGraphError: the model has nothing of what `choices` name.
        LoweringError, RuntimeUnavailableError: as `estimate`.
    """
    from aero_compile.errors import InputError
    from aero_compile.search.run import Search, Settings

    if isinstance(choices, str):
        raise InputError(f"choices are a list of names, as ({choices!r},), not one text")
    settings = Settings(
        budget=budget,
        seq_len=seq_len,
        choices=None if choices is None else tuple(choices),
        order=order,
        compare=tuple(compare),
        network=network,
        logits=logits,
        probe_tokens=probe_tokens,
        relaxation_steps=relaxation_steps,
        seed=seed,
    )
    return Search(model, settings, calibration, held_out, state, say).run()
