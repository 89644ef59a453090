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
import contextlib
import json
import math
import os
import platform
import shutil
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from aero_compile.errors import AeroError, InputError, PartyError
from aero_compile.files import make_private_folder, write_private
from aero_compile.plain_help import HelpParser
from aero_compile.runtime.hosts.link import PlainWay, Way, connect, not_connected, parse_address, watch_peer
from aero_compile.runtime.hosts.measure import check_against_wire, check_profile
from aero_compile.runtime.hosts.opening import check_guard, open_logits, send_share
from aero_compile.runtime.hosts.tls import TLSConfig, TLSWay
from aero_compile.runtime.kernels.run import run_kernel
from aero_compile.runtime.kernels.side import Exchanged, Side
from aero_compile.runtime.offline.prepare import agree, agreed_name, prepare, prepared_steps
from aero_compile.runtime.offline.store import Store, fingerprint
from aero_compile.runtime.prefix import digest_of
from aero_compile.runtime.program import Program, client_inputs
from aero_compile.runtime.program_parts import SET_UP, SET_UP_INPUTS, KernelStep, TensorSpec
from aero_compile.runtime.roles import CLIENT, SERVER
from aero_compile.runtime.spu_config import SpuLog, import_spu, plain_message, runtime_config, small_config

UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile)
"""What NumPy raises for a file that is missing, not its own, empty or cut off."""

EVENT = "aero-party "
"""Prefix of event lines on standard output."""

LINGER_SECONDS = 0.3
"""Time for the reply to the peer's last message to leave; without it the peer reports a lost connection."""

ROLES = {SERVER: "server", CLIENT: "client"}


def main(argv: list[str] | None = None) -> int:
    """Run one party; returns the exit code (2 for errors that were reported)."""
    arguments = _parser().parse_args(argv)
    os.umask(0o077)  # SPU's log and all else that this process writes is for its owner alone
    end_with_parent(arguments.with_parent, arguments.scratch)
    try:
        _Party(arguments).run()
    except AeroError as error:
        _report_error(type(error).__name__, str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        _report_error("PartyError", f"{ROLES[arguments.rank]}: {plain_message(error)}")
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
        self.rank: int = arguments.rank
        self.role = ROLES[self.rank]
        for address in (arguments.address, arguments.peer):
            parse_address(address)
        self.tls = self._tls()
        self.output = Path(arguments.output)
        make_private_folder(self.output)
        self.program = Program.load(arguments.program)
        if self.program.protocol != arguments.protocol:
            raise InputError(
                f"{arguments.program} is compiled for {self.program.protocol}, and this party runs "
                f"{arguments.protocol}: in semi2k the server could open the client's shares. To run it all the same: "
                f"--protocol {self.program.protocol}"
            )
        self.published = self._published()
        self.own = self._own_inputs()
        self.store = self._store()
        self._timer: threading.Timer | None = None

    def run(self) -> None:
        spu = import_spu()
        log = SpuLog(spu, self.output / "spu.log")
        config = runtime_config(self.program.protocol, self.program.field, self.program.fraction_bits)
        options = self.options
        way: Way = PlainWay(options.address, options.peer)
        if self.tls is not None:
            way = TLSWay(options.address, options.peer, self.tls, lambda why: _die(f"{self.role}: {why}"))
        self._deadline(options.connect_timeout, lambda: not_connected(way, options.connect_timeout))
        link = connect(spu, self.rank, way, options.timeout, options.connect_timeout)
        self._agree(link, str(config))
        self._deadline(options.timeout, lambda: f"{self.role}: the computation took longer than {options.timeout:g} s")
        stop_watch = watch_peer(way.answers, lambda: _die(f"{self.role}: lost the other party"))
        started = time.perf_counter()
        runtime, side = spu.Runtime(link, config), Side(spu, link, self.rank, small_config(self.program.protocol))
        if options.set_up:
            self._set_up(spu, runtime, config, side)
        link.barrier()
        setup = {"seconds": time.perf_counter() - started, "wire": way.read()}
        offline = [self._prepare(side, runtime, config, log, way) for _ in range(options.offline)]
        runs = []
        logits: npt.NDArray[Any] | None = None
        for number in range(options.runs):
            _event("run", number=number, steps=len(self.program.steps))
            record, logits = self._forward(side, runtime, config, log, way)
            runs.append(record)
        stop_watch.set()
        if logits is not None:
            write_private(self.output / "logits.npy", lambda file: np.save(file, logits, allow_pickle=False))
        stats = {
            "role": self.role,
            "setup": setup,
            "offline": offline,
            "runs": runs,
            "program": self.program.digest,
            "versions": {"python": platform.python_version(), "spu": str(spu.__version__)},
        }
        write_private(self.output / "stats.json", lambda file: file.write(json.dumps(stats).encode()))
        link.barrier()  # the peer holds its results too: both may close
        _event("done")
        link.stop_link()
        time.sleep(LINGER_SECONDS)
        way.close()

    # --- before the computation -----------------------------------------------------------------------

    def _published(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that both parties hold, the same as when the program was compiled."""
        path, specs = self.options.public, self.program.published
        if (path is None) != (not specs):
            given = (
                "gives clients weights: add --public public.npz" if specs else "gives clients no weights: no --public"
            )
            raise InputError(f"{self.options.program} {given}")
        if path is None:
            return {}
        found = _arrays(path, specs)
        if digest_of(found) != self.program.published_digest:
            raise InputError(f"{path} does not hold the weights that {self.options.program} was compiled with")
        return found

    def _own_inputs(self) -> dict[str, npt.NDArray[Any]]:
        if self.rank == SERVER:
            if self.options.weights is None or self.options.tokens is not None:
                raise InputError("the server (rank 0) takes --weights and no --tokens")
            return _arrays(self.options.weights, self.program.weights)
        if self.options.tokens is None or self.options.weights is not None:
            if self.options.runs == 0 and self.options.weights is None:
                return {}  # it prepares, for tokens that there are not yet
            raise InputError("the client (rank 1) takes --tokens and no --weights")
        spec = self.program.tokens
        try:
            ids = np.load(self.options.tokens, allow_pickle=False)
        except UNREADABLE as error:
            raise InputError(f"{self.options.tokens} does not hold tokens: {error}") from error
        if not isinstance(ids, np.ndarray):
            raise InputError(
                f"{self.options.tokens} is an archive of arrays (.npz); --tokens takes one array, "
                f"as np.save writes it (.npy), of integers {spec.shape[:2]}"
            )
        if ids.dtype.kind not in "iu" or ids.shape != spec.shape[:2]:
            raise InputError(f"the program takes integer tokens {spec.shape[:2]}, not {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= spec.shape[2]:
            raise InputError(f"token ids must lie between 0 and {spec.shape[2] - 1}")
        return client_inputs(self.program, ids, self.published)

    def _tls(self) -> TLSConfig | None:
        paths = (self.options.tls_cert, self.options.tls_key, self.options.tls_ca)
        if not any((*paths, self.options.tls_peer_name)):
            return None
        if not all(paths):
            raise InputError("TLS needs all of --tls-cert, --tls-key and --tls-ca")
        config = TLSConfig(*paths, self.options.tls_peer_name)
        config.check()
        return config

    def _store(self) -> Store | None:
        """Where this party's preparations are; None for a program that takes none."""
        options = self.options
        if options.offline < 0:
            raise InputError(f"--offline takes a number of runs, not {options.offline}")
        if not self.program.is_prepared:
            if options.offline or options.preparations is not None or options.runs == 0:
                raise InputError(f"{options.program} takes nothing prepared: compile it with offline=True")
            return None
        if options.preparations is None:
            raise InputError(f"{options.program} is compiled with offline=True: --preparations DIR says where they are")
        weights = self.own if self.rank == SERVER else {}
        return Store(options.preparations, self.program.digest, fingerprint(self.role, weights))

    def _agree(self, link: Any, config: str) -> None:
        """Compare role, program and configuration with the peer's before any share exists."""
        mine = {
            "role": self.role,
            "program": self.program.digest,
            "config": config,
            "spu": self.program.versions["spu"],
            "runs": self.options.runs,
            "offline": self.options.offline,
            "set-up": self.options.set_up,
        }
        theirs = json.loads(link.all_gather(json.dumps(mine))[1 - self.rank])
        for name, value in mine.items():
            if name != "role" and theirs.get(name) != value:
                raise PartyError(
                    f"{self.role}: the other party has a different {name}: {theirs.get(name)!r}, not {value!r}"
                )
        if theirs.get("role") == self.role:
            raise PartyError(f"both parties claim to be the {self.role}")
        _event("connected")

    def _deadline(self, seconds: float, message: Callable[[], str]) -> None:
        """End the process with `message` unless a later deadline is set within `seconds`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, lambda: _die(message()))
        self._timer.daemon = True
        self._timer.start()

    # --- the computation ------------------------------------------------------------------------------

    def _set_up(self, spu: Any, runtime: Any, config: Any, side: Side) -> None:
        """Make keys, oblivious transfers and triples once, so that the first forward costs what a later one does."""
        _event("set-up")
        io = spu.Io(2, config)
        names = [spec.name for spec in SET_UP_INPUTS]
        for owner, spec in enumerate(SET_UP_INPUTS):
            zeros = np.zeros(spec.shape, spec.dtype)
            runtime.set_var(spec.name, io.make_shares(zeros, spu.Visibility.VIS_SECRET, owner)[self.rank])
        runtime.run(spu.Executable(SET_UP, names, [SET_UP], self.program.codes[SET_UP].encode()))
        for name in (*names, SET_UP):
            runtime.del_var(name)
        for kernel in self.program.kernels:
            if shapes := kernel.set_up():
                kernel.run(side, *(np.zeros(math.prod(shape), np.uint64) for shape in shapes))

    def _prepare(self, side: Side, runtime: Any, config: Any, log: SpuLog, way: Way) -> dict[str, Any]:
        """Prepare one run; returns what it cost."""
        _event("offline", steps=len(prepared_steps(self.program)))
        assert self.store is not None
        before = way.read()
        side.link.barrier()
        started = time.perf_counter()
        log.read()

        def profile(what: str) -> dict[str, Any]:
            found = log.read()
            check_profile(found, what)
            return found

        name = agreed_name(side.link)
        kept, steps = prepare(side, side.spu.Io(2, config), runtime, self.program, self.own, profile)
        self.store.save(name, kept)
        side.link.barrier()  # the other has it too
        record = {"seconds": time.perf_counter() - started, "steps": steps}
        record["wire"] = [after - was for after, was in zip(way.read(), before, strict=True)]
        check_against_wire(record, 0)
        return record

    def _forward(
        self, side: Side, runtime: Any, config: Any, log: SpuLog, way: Way
    ) -> tuple[dict[str, Any], npt.NDArray[Any] | None]:
        spu, link = side.spu, side.link
        before = way.read()  # the peer sends nothing of this forward before both have reached the barrier
        link.barrier()
        started = time.monotonic()
        io = spu.Io(2, config)
        prepared = {} if self.store is None else self.store.take(agree(link, self.rank, self.store.ready()))
        for spec in self.program.weights:
            runtime.set_var(spec.name, self._share(spu, io, spec, SERVER))
        for spec in self._of_client():
            runtime.set_var(spec.name, self._share(spu, io, spec, CLIENT))
        for spec in self.program.shared_inputs:
            shares = io.make_shares(self.published[spec.name], spu.Visibility.VIS_PUBLIC)
            runtime.set_var(spec.name, shares[self.rank])
        log.read()
        steps = []
        for at, step in enumerate(self.program.steps):
            _event("step", at=at, label=step.label, place=step.place)
            begun, already = time.monotonic(), side.executions
            side.exchanged = Exchanged()
            if isinstance(step, KernelStep):
                side.prepared = prepared.pop(at, {})
                run_kernel(side, io, runtime, step)
            else:
                code = self.program.codes[step.code].encode()
                runtime.run(spu.Executable(step.label, list(step.inputs), list(step.outputs), code))
            executions = side.executions - already if isinstance(step, KernelStep) else 1
            profile = log.read()
            check_profile(profile, f"step {at}, {step.label} ({step.place})", executions)
            profile |= {name: profile[name] + count for name, count in vars(side.exchanged).items()}
            seconds = time.monotonic() - begun
            steps.append({"op": step.label, "place": step.place, "begun": begun, "seconds": seconds, **profile})
            for name in step.free:
                runtime.del_var(name)
        sent, received = 0, 0
        if self.program.guard is not None:
            sent, received = check_guard(link, runtime.get_var(self.program.guard), io, self.rank)
            runtime.del_var(self.program.guard)
        share, logits = runtime.get_var(self.program.logits.name), None
        if self.rank == SERVER:
            revealed, opened = send_share(link, share), 0
        else:
            revealed, (opened, logits) = 0, open_logits(link, share, io, self.program)
        revealed, opened = revealed + sent, opened + received
        runtime.del_var(self.program.logits.name)
        link.barrier()
        record = {
            "begun": started,
            "seconds": time.monotonic() - started,
            "steps": steps,
            "revealed_bytes": revealed,
            "wire": [after - was for after, was in zip(way.read(), before, strict=True)],
        }
        check_against_wire(record, opened)
        return record, logits

    def _of_client(self) -> tuple[TensorSpec, ...]:
        """The client's inputs that steps read."""
        program = self.program
        return (*([program.tokens] if program.reads_tokens else []), *program.clients)

    def _share(self, spu: Any, io: Any, spec: TensorSpec, owner: int) -> Any:
        """This party's piece of an input: its own value if it is the owner, an empty one otherwise.

        SPU keeps an owned input as it is at its owner and represents it at the peer by its shape alone, so
        nothing is sent; it becomes a secret share in the first operator that mixes it with the peer's data.
        """
        value = self.own[spec.name] if owner == self.rank else np.zeros(spec.shape, spec.dtype)
        return io.make_shares(value, spu.Visibility.VIS_SECRET, owner)[self.rank]


def _arrays(path: Path, specs: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that a program declares."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {spec.name: _checked(spec, file[spec.name]) for spec in specs}
    except (*UNREADABLE, KeyError, AttributeError, TypeError) as error:  # the last two: no archive but an array
        raise InputError(f"{path} does not hold the weights: {error}") from error


def _checked(spec: TensorSpec, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.shape != spec.shape or str(array.dtype) != spec.dtype:
        raise InputError(
            f"weight {spec.name} is {array.dtype} {array.shape}; the program takes {spec.dtype} {spec.shape}"
        )
    return array


def end_with_parent(enabled: bool, scratch: Path | None) -> None:
    """End this process as soon as standard input is closed, that is when its launcher is gone.

    A launcher that was killed left its folder `scratch` behind; it is removed, and the one around it if that is
    empty then.
    """
    if not enabled:
        return

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(OSError):
                scratch.parent.rmdir()
        os._exit(4)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()


def _event(kind: str, **content: Any) -> None:
    print(EVENT + json.dumps({"event": kind, **content}), flush=True)


def _report_error(kind: str, message: str) -> None:
    _event("error", error=kind, message=message)
    print(f"error: {message}", file=sys.stderr, flush=True)


def _die(message: str) -> NoReturn:
    _report_error("PartyError", message)
    os._exit(2)  # SPU is blocked in native code, which no exception can reach


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the link's threads, whose peer may be gone
