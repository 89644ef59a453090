"""The bill of the runs of one text: what is prepared for them and for the text, and then the runs themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aero_compile.runtime.costs import pphlo
from aero_compile.runtime.costs.batches import BilledBatches
from aero_compile.runtime.costs.billing import bill_forward, bill_offline
from aero_compile.runtime.costs.session import Cost, Session
from aero_compile.runtime.generation.programs import Programs
from aero_compile.runtime.generation.texts import Run, TextNumbers, prepared_for
from aero_compile.runtime.hosts.network_spec import Network
from aero_compile.runtime.offline.prepare import text_steps

Columns = dict[str, Any]


def bill_text(
    session: Session,
    programs: Programs,
    runs: Sequence[Run],
    functions: Mapping[str, pphlo.Function],
    network: Network,
    batches: BilledBatches | None = None,
) -> list[tuple[list[Columns], Cost]]:
    """Bill the runs of a text, whose preparations come first; returns for each run what `bill_forward` does.

    Products take rows of `batches`. What was prepared for the text stands with the first run that computes logits from
    it.
    """
    of_runs, of_texts = list[Mapping[int, Columns]](), dict[str, list[Mapping[int, Columns]]]()
    for name in prepared_for(programs, runs):
        if name in programs.texts:
            program = programs.texts[name]
            of_texts.setdefault(name, []).append(bill_offline(session, program, functions, network, steps=text_steps))
        else:
            of_runs.append(bill_offline(session, programs.all[name], functions, network, batches))
    numbers, found, due = TextNumbers(programs), list[tuple[list[Columns], Cost]](), list[Mapping[str, Columns]]()
    for (name, position, kept), own in zip(runs, of_runs, strict=True):
        program = programs.all[name]
        if text := numbers.begin(name, position, kept):
            sites = programs.texts[text].cached_products
            prepared = of_texts[text].pop(0)
            due.append({site: prepared[at] for site, at in sites.items()})
        before = dict(own)
        if due and due[0].keys() <= program.cached_products.keys():
            before |= {program.cached_products[site]: columns for site, columns in due.pop(0).items()}
        session.cached = numbers.sites
        found.append(bill_forward(session, program, functions, network, before))
    session.cached = {}
    return found
