"""The programs of a server: found where they were exported, or compiled of a model, one for each length of text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError
from aero_compile.runtime.compile import AUTO
from aero_compile.runtime.costs.network import parse_network
from aero_compile.runtime.program.bundle import INDEX
from aero_compile.serving.agreement import versions
from aero_compile.serving.models import load_model, model_digest, model_place, positions_of
from aero_compile.serving.monitoring import note

PROGRAM = "program.json"


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens that programs are compiled for; the fields are the keywords of `find_programs`."""

    lengths: tuple[int, ...] = ()
    room: tuple[int, ...] = ()
    fills: tuple[int, ...] = ()
    checks: tuple[int, ...] = ()
    running_sums: bool = False

    def check(self, positions: int | None) -> None:
        """Raise InputError for a number that a model of so many positions (None: any) cannot take."""
        if not (self.lengths or self.room):
            raise InputError("give lengths=, of whole texts, or room=, for generated texts: nothing would be served")
        most = max(self.room, default=0)
        for name, least, largest, limit in (
            ("lengths", 1, positions, "positions of the model"),
            ("room", 2, positions, "positions of the model"),
            ("fills", 2, most, f"tokens of room={most}"),
            ("checks", 2, min(self.room, default=0), "tokens of the smallest room="),
        ):
            self._check(name, least, largest, limit)
        if self.running_sums and self.checks:
            raise InputError("running_sums=True and checks= exclude each other: guesses that are wrong are taken back")
        if self.running_sums and not self.room:
            raise InputError("running_sums=True is of generated texts: give room= too")

    def _check(self, name: str, least: int, largest: int | None, limit: str) -> None:
        for size in getattr(self, name):
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise InputError(f"{name}={size}: give whole numbers of tokens, each at least {least}")
            if name in ("fills", "checks") and not self.room:
                raise InputError(f"{name}={size} is of generated texts: give room= too")
            if largest is not None and size > largest:
                raise InputError(f"{name}={size} is more than the {largest} {limit}: give at most {largest}")

    def refuse_any(self, source: Any) -> None:
        """Raise InputError for any number: programs that are compiled have theirs."""
        given = [name for name, value in vars(self).items() if value]
        if given:
            told = ", ".join(f"{name}=" for name in given)
            raise InputError(f"{source} holds compiled programs, which have their sizes: leave {told} out")


def find_programs(
    source: Any,
    lengths: Sequence[int],
    protocol: str,
    folder: str | os.PathLike[str],
    *,
    room: int | Sequence[int] | None = None,
    fills: Sequence[int] = (),
    checks: Sequence[int] = (),
    running_sums: bool = False,
    **options: Any,
) -> list[Path]:
    """Return folders that hold one program each, with its weights, or all programs of a generation.

    Args:
        source: a folder that `aero_compile.runtime.export` wrote or one of such folders, which is taken as it is; or
            what is compiled: a saved artifact's folder, that of a Hugging Face model, a GGUF file, or a model.
        lengths: tokens of the whole texts that are compiled for, each at least 1.
        protocol: that is compiled for.
        folder: where compiled programs are kept (mode 0700). Those of a folder or file are found there again, under
            a name made of its digest and the options.
        room: positions of texts that are generated, or of several rooms, through which they grow; None: none are.
        fills: how many positions from the first on of such a text are computed at once, one program for each; none:
            as many as `compile_generation` makes.
        checks: how many positions with guesses of the client are computed at once, one program for each.
        running_sums: as of `compile_generation`.
        options: of `aero_compile.runtime.compile_model`. Tables that are looked up under encryption are not made here.

    Raises:
        InputError: there is nothing to serve at `source`, or a size cannot be; nothing was read or compiled.
        LoweringError: as of `compile_model`.
    """
    options.setdefault("lookup", AUTO)  # part of the name of what is kept
    key, wanted, rooms = "", sorted(set(lengths)), sorted({room} if isinstance(room, int) else {*(room or ())})
    sizes = Sizes(tuple(wanted), tuple(rooms), tuple(fills), tuple(checks), running_sums)
    if isinstance(source, (str, os.PathLike)):
        found = _exported(Path(source))
        if found:
            sizes.refuse_any(source)
            return found
        place = model_place(Path(source))
        sizes.check(positions_of(place))
        parse_network(options.get("network", "loopback"))
        source, key = load_model(place), _name(place, protocol, options)
    else:
        sizes.check(getattr(source, "max_positions", None))
    made: dict[str, Callable[[Path], None]] = {
        str(length): partial(_compile_whole, source, length, protocol, options) for length in wanted
    }
    if rooms:
        many = [*map(str, sorted(set(fills))), *(f"c{size}" for size in sorted(set(checks)))]
        name = "-".join(["+".join(map(str, rooms)), *many, *(["sums"] if running_sums else [])])
        told = {"fills": tuple(fills) or None, "checks": tuple(checks), "running_sums": running_sums, **options}
        made[f"steps-{name}"] = partial(_compile_steps, source, rooms, protocol, told)
    return [_compiled(Path(folder) / f"{key}{name}", bool(key), make) for name, make in made.items()]


def _exported(place: Path) -> list[Path]:
    if (place / PROGRAM).is_file():
        return [place]
    if (place / INDEX).is_file():
        return [place]
    return sorted(each.parent for name in (PROGRAM, INDEX) for each in place.glob(f"*/{name}"))


def _name(place: Path, protocol: str, options: dict[str, Any]) -> str:
    """The name that the programs of a model have with these options, whose texts become batches."""
    from aero_compile.runtime.inference import batches
    from aero_compile.runtime.program.program import FORMAT

    said = model_digest(place)
    texts = options["calibration"] = batches(options.get("calibration")) or None
    for text in texts or ():
        said.update(repr(text.tolist()).encode())
    others = sorted((name, repr(value)) for name, value in options.items() if name != "calibration")
    said.update(repr((protocol, FORMAT, sorted(versions().items()), others)).encode())
    return f"{said.hexdigest()[:16]}-"


def _compiled(place: Path, keeps: bool, make: Callable[[Path], None]) -> Path:
    """Let `make` write programs into `place`, unless they are there already and may be used again."""
    if keeps and place.is_dir():
        return place
    note("compiling", programs=place.name)
    new = place.with_name(f"{place.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    make(new)
    shutil.rmtree(place, ignore_errors=True)
    new.rename(place)
    return place


def _compile_whole(model: Any, length: int, protocol: str, options: dict[str, Any], place: Path) -> None:
    from aero_compile.runtime.inference import compile_model, export

    export(compile_model(model, 1, length, protocol, **options), place, tables=False)


def _compile_steps(model: Any, rooms: list[int], protocol: str, options: dict[str, Any], place: Path) -> None:
    from aero_compile.runtime.compile_programs import compile_generation, export_generation

    export_generation(compile_generation(model, rooms, protocol, **options), place, tables=False)
