"""What a token of private text costs, by how many tokens there is room for: measured in two processes, and estimated.

A token costs the same wherever in the room it stands, so the first tokens of a short text tell it. Each row is checked
against greedy text in the clear.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from aero_compile.commands.options import positive
from aero_compile.exit_codes import exit_code
from aero_compile.files import write_atomically
from aero_compile.model import TransformedModel
from aero_compile.plain_help import HelpParser
from aero_compile.progress import Progress
from aero_compile.reporting.report import aligned, command_line
from aero_compile.runtime.costs.model import estimate_generation
from aero_compile.runtime.generation.export import compile_generation
from aero_compile.runtime.generation.private import local_decoder
from aero_compile.runtime.generation.programs import CompiledGeneration
from aero_compile.runtime.generation.session import Cost, Generation, Session
from aero_compile.runtime.hosts.network_spec import Network, parse_network
from aero_compile.training.run_directory import versions
from aero_compile.units import human_bytes
from benchmarks.lib.pi_rows import LAYERS, SHAPES, Task, build, check_lengths

FORMAT = "aero_compile.generation/1"


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    p = HelpParser(prog="generation.py", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--model", choices=list(SHAPES), default="mini", help="shape; default: %(default)s")
    p.add_argument("--layers", type=positive, metavar="N", help="N layers of the shape instead of its own number")
    p.add_argument("--recipe", default="softmax_only", help="default: %(default)s")
    p.add_argument("--room", type=positive, nargs="+", default=[32], metavar="R", help="tokens of a text; default: 32")
    p.add_argument("--tokens", type=positive, default=3, metavar="N", help="to generate; default: %(default)s")
    p.add_argument("--offline", action="store_true", help="prepare what can be before the prompt is known")
    p.add_argument("--network", default="loopback", help="loopback, lan, wan or MBPS:RTT_MS; default: %(default)s")
    p.add_argument("--estimate", action="store_true", help="run nothing, predict only")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--hours", type=float, default=2.0, metavar="H", help="at most, for a token; default: %(default)s")
    p.add_argument("--json", type=Path, metavar="FILE", help="write rows here, each as soon as it is made")
    return p


def run(args: argparse.Namespace) -> int:
    """Make every row; returns 1 if a text was not the one in the clear."""
    tasks = [Task(args.model, args.recipe, room, args.layers or LAYERS[args.model]) for room in args.room]
    check_lengths(tasks)
    rows: list[dict[str, Any]] = []
    progress = Progress(len(tasks))
    for task in tasks:
        with progress.step(f"{task.model} {task.recipe}, room for {task.seq_len}"):
            rows.append(row(task, args))
        if args.json:
            write(args, rows)
    print(text(rows))
    return int(not all(each.get("same_text", True) for each in rows))


def row(task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Compile for one room, predict a token's bill and, unless only that was asked for, generate."""
    model, network = build(task, args.seed), parse_network(args.network)
    began = time.monotonic()
    compiled = compile_generation(model, task.seq_len, fills=[], guards=False, offline=args.offline, network=network)
    found: dict[str, Any] = {"room": task.seq_len, "layers": task.layers, "compiling": time.monotonic() - began}
    bill = estimate_generation(compiled.programs, 1, args.tokens, network=network, warm="setup").token
    assert bill is not None
    found["estimate"] = asdict(Cost(bill.bytes, bill.messages, bill.seconds))
    found["estimate_offline"] = asdict(Cost(bill.offline_bytes, bill.offline_messages, bill.offline_seconds))
    if args.estimate:
        return found
    first = torch.randint(0, model.vocab_size, (1,), generator=torch.Generator().manual_seed(args.seed))
    made = generated(compiled, int(first), args, network)
    return found | {
        "set_up": asdict(made.set_up),
        "offline": asdict(made.offline),
        "tokens": [asdict(token.cost) for token in made.tokens],
        **beside_the_clear(model, made),
    }


def generated(compiled: CompiledGeneration, first: int, args: argparse.Namespace, network: Network) -> Generation:
    """Generate behind one token between two processes, whatever can be prepared before."""
    with local_decoder(compiled, set_up=True, timeout=3600 * args.hours, network=network) as decoder:
        offline = decoder.prepare(["step"] * args.tokens) if args.offline else Cost()
        return replace(Session(decoder).generate([first], args.tokens), offline=offline)


@torch.no_grad()
def beside_the_clear(model: TransformedModel, made: Generation) -> dict[str, Any]:
    """Whether greedy text in the clear is the same, and the largest error of a logit."""
    text = torch.tensor([[*made.prompt, *made.ids[:-1]]])
    clear = model(text).logits[0, len(made.prompt) - 1 :].numpy()
    private = np.stack([token.logits for token in made.tokens])
    return {
        "same_text": made.ids == [int(each) for each in clear.argmax(-1)],
        "logit_error": float(np.abs(private - clear).max()),
    }


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table of what the last token of each row took, for a terminal."""
    head = ["room", "a token", "messages", "seconds", "estimated", "messages", "seconds", "prepared", "largest error"]
    lines = []
    for each in rows:
        costs, predicted = each.get("tokens", [None]), each["estimate"]
        measured = costs[-1]
        prepared = each["offline"]["bytes"] // len(costs) if measured else each["estimate_offline"]["bytes"]
        last = [human_bytes(prepared) if prepared else "–", f"{each['logit_error']:.1e}" if measured else "–"]
        lines.append([str(each["room"]), *figures(measured), *figures(predicted), *last])
    return "\n".join(aligned(head, lines, left=set()))


def figures(cost: dict[str, Any] | None) -> list[str]:
    """Bytes, messages and seconds as cells."""
    if cost is None:
        return ["–"] * 3
    return [human_bytes(cost["bytes"]), f"{cost['messages']:,}", f"{cost['seconds']:.2f}"]


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows made so far, with what they came from."""
    config = {key: value for key, value in vars(args).items() if key not in ("json", "seed")}
    document = {
        "format": FORMAT,
        "command": command_line(),
        "seed": args.seed,
        "config": config,
        "versions": {**versions(), "platform": platform.platform()},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": list(os.getloadavg()),
        "rows": list(rows),
    }
    write_atomically(args.json, json.dumps(document, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0, 1 for a text unlike the one in the clear, 2 for a wrong call, 130 if interrupted."""
    args = parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
