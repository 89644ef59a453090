"""One party of the private computation, as a process: `python -m aero_compile.runtime.party`.

Rank 0 is the server (weights), rank 1 the client (tokens, logits). On two hosts, start

    python -m aero_compile.runtime.party --rank 0 --address HOST0:PORT --peer HOST1:PORT \\
        --program program.json --weights weights.npz --output out
    python -m aero_compile.runtime.party --rank 1 --address HOST1:PORT --peer HOST0:PORT \\
        --program program.json --tokens tokens.npy --output out

(`aero_compile.runtime.export` writes program and weights; tokens.npy holds int64 ids [B, T]. Where clients are given
weights, it writes public.npz too, and both parties add --public public.npz.)
For a program that is compiled with `offline=True`, both prepare first, before there are tokens, by the same commands
with `--runs 0 --offline 5 --preparations DIR` and without `--tokens`; each run then takes one (`--runs 1
--preparations DIR`).
`aero_compile.private_inference` starts exactly these processes on one machine. Events are printed as JSON
lines; `stats.json` and, for the client, `logits.npy` are written to the output directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import AeroError, PartyError
from aero_compile.files import make_private_folder, write_private
from aero_compile.plain_help import HelpParser
from aero_compile.runtime.hosts.computation import Computation, config_of, print_event
from aero_compile.runtime.hosts.ending import Deadline, die, end_with_parent, report_error
from aero_compile.runtime.hosts.link import PlainWay, Way, connect, not_connected, parse_address, watch_peer
from aero_compile.runtime.hosts.party_inputs import read_inputs, tls_config
from aero_compile.runtime.hosts.tls import TLSWay
from aero_compile.runtime.roles import CLIENT, ROLES, SERVER
from aero_compile.runtime.spu_config import SpuLog, import_spu, load_spu_alone, plain_message

LINGER_SECONDS = 0.3
"""Time for the reply to the peer's last message to leave; without it the peer reports a lost connection."""


def main(argv: list[str] | None = None) -> int:
    """Run one party; returns the exit code (2 for errors that were reported)."""
    arguments = _parser().parse_args(argv)
    os.umask(0o077)  # SPU's log and all else that this process writes is for its owner alone
    end_with_parent(arguments.with_parent, arguments.scratch)
    try:
        _Party(arguments).run()
    except AeroError as error:
        report_error(type(error).__name__, str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        report_error("PartyError", f"{ROLES[arguments.rank]}: {plain_message(error)}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = HelpParser(prog="python -m aero_compile.runtime.party", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--rank", type=int, choices=(SERVER, CLIENT), required=True, help="0 server, 1 client")
    add("--address", required=True, help="host:port on which this party listens")
    add("--peer", required=True, help="host:port of the other party")
    add("--program", type=Path, required=True, help="the compiled program, equal on both sides")
    add("--weights", type=Path, help="server: .npz of the weights")
    add("--tokens", type=Path, help="client: .npy of int64 token ids [B, T]")
    add("--public", type=Path, help="both: .npz of the weights that clients are given, where there are any")
    add("--output", type=Path, required=True, help="directory for stats.json and logits.npy")
    add("--runs", type=int, choices=(0, 1, 2), default=2, help="2: a cold and a warm forward; 0: prepare only")
    add("--offline", type=int, default=0, metavar="N", help="prepare so many runs, before the tokens are needed")
    add("--preparations", type=Path, metavar="DIR", help="private folder of this party's preparations")
    add("--set-up", action="store_true", help="set up by a short computation before the first forward")
    add("--timeout", type=float, default=3600.0, help="seconds for the computation, after connecting")
    add("--connect-timeout", type=float, default=60.0, help="seconds to wait for the other party")
    add("--protocol", choices=("cheetah", "semi2k"), default="cheetah", help="refuse a program for another protocol")
    add("--tls-cert", help="PEM certificate of this party")
    add("--tls-key", help="PEM key of this party")
    add("--tls-ca", help="PEM certificate of the authority that signed both")
    add("--tls-peer-name", metavar="NAME", help="name in the other party's certificate (default: the host of --peer)")
    add("--with-parent", action="store_true", help="end when standard input is closed")
    add("--scratch", type=Path, metavar="DIR", help="with --with-parent: a folder to remove then, inputs and all")
    return parser


class _Party:
    """Everything one party does, in order."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.options = arguments
        self.role = ROLES[arguments.rank]
        for address in (arguments.address, arguments.peer):
            parse_address(address)
        self.tls = tls_config(arguments)
        self.output = Path(arguments.output)
        make_private_folder(self.output)
        self.inputs = read_inputs(arguments)
        self._deadline = Deadline()

    def run(self) -> None:
        spu = import_spu()
        log = SpuLog(spu, self.output / "spu.log")
        options = self.options
        way: Way = PlainWay(options.address, options.peer)
        if self.tls is not None:
            way = TLSWay(options.address, options.peer, self.tls, lambda why: die(f"{self.role}: {why}"))
        self._deadline.set(options.connect_timeout, lambda: not_connected(way, options.connect_timeout))
        link = connect(spu, options.rank, way, options.timeout, options.connect_timeout)
        self._agree(link)
        self._deadline.set(
            options.timeout, lambda: f"{self.role}: the computation took longer than {options.timeout:g} s"
        )
        stop_watch = watch_peer(way.answers, lambda: die(f"{self.role}: lost the other party"))
        stats, logits = self._compute(spu, link, log, way)
        stop_watch.set()
        if logits is not None:
            write_private(self.output / "logits.npy", lambda file: np.save(file, logits, allow_pickle=False))
        write_private(self.output / "stats.json", lambda file: file.write(json.dumps(stats).encode()))
        link.barrier()  # the peer holds its results too: both may close
        print_event("done")
        link.stop_link()
        time.sleep(LINGER_SECONDS)
        way.close()

    def _compute(self, spu: Any, link: Any, log: SpuLog, way: Way) -> tuple[dict[str, Any], npt.NDArray[Any] | None]:
        """Set up, prepare and run as often as was asked; returns what it cost and, at the client, the logits."""
        started = time.perf_counter()
        computation = Computation(spu, link, self.inputs, log, way)
        if self.options.set_up:
            computation.set_up()
        link.barrier()
        setup = {"seconds": time.perf_counter() - started, "wire": way.read()}
        offline = [computation.prepare() for _ in range(self.options.offline)]
        runs = []
        logits: npt.NDArray[Any] | None = None
        for number in range(self.options.runs):
            print_event("run", number=number, steps=len(self.inputs.program.steps))
            record, logits = computation.forward()
            runs.append(record)
        stats = {
            "role": self.role,
            "setup": setup,
            "offline": offline,
            "runs": runs,
            "program": self.inputs.program.digest,
            "versions": {"python": platform.python_version(), "spu": str(spu.__version__)},
        }
        return stats, logits

    def _agree(self, link: Any) -> None:
        """Compare role, program and configuration with the peer's before any share exists."""
        program = self.inputs.program
        mine = {
            "role": self.role,
            "program": program.digest,
            "config": str(config_of(program)),
            "spu": program.versions["spu"],
            "runs": self.options.runs,
            "offline": self.options.offline,
            "set-up": self.options.set_up,
        }
        theirs = json.loads(link.all_gather(json.dumps(mine))[1 - self.inputs.rank])
        for name, value in mine.items():
            if name != "role" and theirs.get(name) != value:
                raise PartyError(
                    f"{self.role}: the other party has a different {name}: {theirs.get(name)!r}, not {value!r}"
                )
        if theirs.get("role") == self.role:
            raise PartyError(f"both parties claim to be the {self.role}")
        print_event("connected")


if __name__ == "__main__":
    load_spu_alone()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the link's threads, whose peer may be gone
