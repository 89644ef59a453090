"""Random models, scales and inputs through the whole compiler: within tolerance or refused, never silently wrong.

`--what capture`: the transformed model against its source in evaluation and training. `--what exact`: capture and every
exact pass against the source, in float64. `--what private`: these, and then both
parties, in this process. A run is `within` its tolerance, `refused` before the parties start, a `silent miss`, or a
`crash`; the last two are bugs. Each seed gives one line of `--output`; the same command goes on where it stopped, and
`--seeds 17,230 --verbose` replays some, and shows the error of every step of a miss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone

import torch

from aero_compile.errors import InputError
from aero_compile.exit_codes import exit_code
from aero_compile.files import refuse_existing, write_atomically
from aero_compile.plain_help import HelpParser
from aero_compile.reporting.report import command_line
from aero_compile.training.run_directory import versions
from benchmarks import torture_capture, torture_private
from benchmarks.torture_private import CRASH, MISS, REFUSED, WITHIN, Outcome
from benchmarks.torture_trace import trace

FORMAT = "aero_compile.torture/1"
KINDS: dict[str, Callable[[int, str], Outcome]] = {
    "exact": torture_private.exact_run,
    "private": torture_private.private_run,
    "capture": torture_capture.capture_run,
}
"""What `--what` can be: a function of a seed and a protocol."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    p = HelpParser(prog="torture.py", description=__doc__)
    p.add_argument("--what", choices=list(KINDS), default="private", help="default: %(default)s")
    p.add_argument("--protocol", choices=["semi2k", "cheetah"], default="semi2k", help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="the first; default: %(default)s")
    p.add_argument("--count", type=int, default=200, help="how many; default: %(default)s")
    p.add_argument("--seeds", metavar="N,N", help="these and no others")
    p.add_argument("--minutes", type=float, help="start no run after so many")
    p.add_argument("--output", type=Path, metavar="FILE", help="one JSON line a run; runs that it has are not repeated")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the counts here")
    p.add_argument("--overwrite", action="store_true", help="replace --json FILE if it exists")
    p.add_argument("--verbose", action="store_true", help="print every run")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 1 if there was a silent miss or a crash."""
    args = parser().parse_args(argv)
    return exit_code(lambda: run(args), "the same command goes on where it stopped")


def run(args: argparse.Namespace) -> int:
    """Go through the seeds and report."""
    refuse_existing(args.json, args.overwrite)
    if args.count < 1:
        raise InputError("--count must be at least 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seeds = _seeds(args)
    known = {each["seed"]: each for each in _lines(args.output) if _same(each, args)}
    found = [known[seed] for seed in seeds if seed in known]
    began = time.monotonic()
    for number, seed in enumerate(seeds):
        if seed in known:
            continue
        if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
            break
        start = time.monotonic()
        outcome = KINDS[args.what](seed, args.protocol)
        line = dataclasses.asdict(outcome) | {"seconds": round(time.monotonic() - start, 3)}
        found.append(line)
        _append(args.output, line)
        _show(args, number + 1, len(seeds), found, outcome)
    document = report(found, args)
    print(f"\r\033[K{table(document)}" if sys.stderr.isatty() else table(document))
    if args.json is not None:
        write_atomically(args.json, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return int(any(line["outcome"] in (MISS, CRASH) for line in found))


def _seeds(args: argparse.Namespace) -> list[int]:
    if args.seeds is None:
        return list(range(args.seed, args.seed + args.count))
    try:
        return [int(each) for each in args.seeds.split(",")]
    except ValueError as error:
        raise InputError(f"--seeds takes numbers with commas between them, not {args.seeds!r}") from error


def _same(line: dict[str, Any], args: argparse.Namespace) -> bool:
    protocol = args.protocol if args.what == "private" else ""
    return bool(line["what"] == args.what and line["protocol"] == protocol)


def _lines(path: Path | None) -> Iterator[dict[str, Any]]:
    """The runs in a file; a line that was cut off by a kill is left out."""
    if path is None or not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue


def _append(path: Path | None, line: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")  # by a kill
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(line, ensure_ascii=False) + "\n")


def _show(args: argparse.Namespace, done: int, total: int, found: list[dict[str, Any]], outcome: Outcome) -> None:
    """A line for each bug (or, with --verbose, each run), and a moving bar on a terminal."""
    bad = outcome.outcome in (MISS, CRASH)
    if bad or args.verbose:
        what = f"seed {outcome.seed}: {outcome.outcome} {outcome.kind} {outcome.detail}"
        print(f"{what}  [{outcome.recipe}; {outcome.weights}; {list(outcome.shape)}]", flush=True)
    if args.verbose:
        print(
            f"  error {outcome.error}, tolerance {outcome.tolerance}, deviation {outcome.deviation}; {outcome.config}"
        )
    if args.verbose and outcome.outcome == MISS and outcome.kind == "private":
        print("\n".join(f"  {line}" for line in trace(outcome.seed, args.protocol)), flush=True)
    counts = Counter(line["outcome"] for line in found)
    said = ", ".join(f"{counts[name]} {name}" for name in (WITHIN, REFUSED, MISS, CRASH))
    if sys.stderr.isatty():
        full = 24 * done // total
        print(f"\r\033[K[{'█' * full}{'·' * (24 - full)}] {done}/{total} {said}", end="", file=sys.stderr, flush=True)
    elif done % 50 == 0 or done == total:
        print(f"{done}/{total}: {said}", file=sys.stderr, flush=True)


def report(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Counts by outcome and by kind, for all models and for ordinary ones; errors of what was within."""

    def counted(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
        counts = Counter(line["outcome"] for line in lines)
        return {name: counts[name] for name in (WITHIN, REFUSED, MISS, CRASH)}

    def kinds(outcome: str) -> dict[str, int]:
        return dict(Counter(line["kind"] for line in found if line["outcome"] == outcome).most_common())

    shares = sorted(line["error"] / line["tolerance"] for line in found if line["outcome"] == WITHIN and line["error"])
    return {
        "format": FORMAT,
        "command": command_line(),
        "versions": versions(),
        "what": args.what,
        "protocol": args.protocol,
        "runs": len(found),
        "seeds": [min(line["seed"] for line in found), max(line["seed"] for line in found)] if found else [],
        "outcomes": counted(found),
        "ordinary": counted([line for line in found if line["ordinary"]]),
        "refused": kinds(REFUSED),
        "misses": kinds(MISS),
        "crashes": kinds(CRASH),
        "bugs": [line["seed"] for line in found if line["outcome"] in (MISS, CRASH)],
        "error as a share of the tolerance": {
            name: shares[min(len(shares) - 1, int(part * len(shares)))] if shares else None
            for name, part in (("median", 0.5), ("99 %", 0.99), ("largest", 1.0))
        },
        "seconds": round(sum(line["seconds"] for line in found)),
    }


def table(document: dict[str, Any]) -> str:
    """The counts as text."""
    lines = [f"{document['runs']} runs, {document['what']} {document['protocol']}: {document['outcomes']}"]
    lines.append(f"ordinary models: {document['ordinary']}")
    for name in ("refused", "misses", "crashes"):
        lines += [f"  {name} {count:5d}  {kind}" for kind, count in document[name].items()]
    lines.append(f"error as a share of the tolerance: {document['error as a share of the tolerance']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
