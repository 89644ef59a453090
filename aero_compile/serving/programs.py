"""The programs of a server: found where they were exported, or compiled of a model, one for each length of text."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError
from aero_compile.serving.journal import note
from aero_compile.serving.transport.agreement import versions

PROGRAM = "program.json"


def find_programs(
    source: Any, lengths: Sequence[int], protocol: str, folder: str | os.PathLike[str], **options: Any
) -> list[Path]:
    """Return folders that hold one program each, with its weights.

    Args:
        source: a folder that `aero_compile.runtime.export` wrote or one of such folders, which is taken as it is; or
            what is compiled: a saved artifact's folder or a model.
        lengths: tokens of the texts that are compiled for, each at least 1.
        protocol: that is compiled for.
        folder: where compiled programs are kept (mode 0700). Those of an artifact are found there again, under a name
            made of the artifact's digest and the options.
        options: of `aero_compile.runtime.compile_model`.

    Raises:
        InputError: there is nothing to serve at `source`, or the lengths cannot be.
        LoweringError: as of `compile_model`.
    """
    key = ""
    if isinstance(source, (str, os.PathLike)):
        found = _exported(Path(source))
        if found:
            return found
        source, key = _artifact(Path(source), protocol, options)
    wanted = sorted(set(lengths))
    if not wanted or wanted[0] < 1:
        raise InputError(f"lengths must be at least one number of tokens from 1 on, not {list(lengths)}")
    return [
        _compiled(source, length, protocol, Path(folder) / f"{key}{length}", bool(key), options) for length in wanted
    ]


def _exported(place: Path) -> list[Path]:
    if (place / PROGRAM).is_file():
        return [place]
    return sorted(each.parent for each in place.glob(f"*/{PROGRAM}"))


def _artifact(place: Path, protocol: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The model of an artifact, and the name that its programs have with these options."""
    from aero_compile.artifact import GRAPH_FILE, load
    from aero_compile.runtime.inference import batches

    if not (place / GRAPH_FILE).is_file():
        raise InputError(f"{place} holds neither programs ({PROGRAM}) nor a saved artifact ({GRAPH_FILE})")
    model = load(place)
    said = hashlib.sha256((place / GRAPH_FILE).read_bytes())  # it names the weights by their digest
    texts = options["calibration"] = batches(options.get("calibration")) or None
    for text in texts or ():
        said.update(repr(text.tolist()).encode())
    others = sorted((name, repr(value)) for name, value in options.items() if name != "calibration")
    said.update(repr((protocol, sorted(versions().items()), others)).encode())
    return model, f"{said.hexdigest()[:16]}-"


def _compiled(model: Any, length: int, protocol: str, place: Path, keeps: bool, options: dict[str, Any]) -> Path:
    """Compile a program into `place`, unless it is there already and may be used again."""
    from aero_compile.runtime.inference import compile_model, export

    if keeps and place.is_dir():
        return place
    note("compiling", length=length)
    new = place.with_name(f"{place.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    export(compile_model(model, 1, length, protocol, **options), new)
    shutil.rmtree(place, ignore_errors=True)
    new.rename(place)
    return place
