"""What many tests need, made once: captured models for all workers of a run, SPU's programs in each worker."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

SHARED_FOLDER = "AERO_COMPILE_TESTS_SHARED_FOLDER"
"""Where one worker finds what another has made; not set where there is one alone."""

R = TypeVar("R")


def made_once(make: Callable[..., R]) -> Callable[..., R]:
    """Cache a function: its results are pickled for the other workers of the run, so they must not be changed."""

    @functools.cache
    def kept(*arguments: Any) -> R:
        folder = os.environ.get(SHARED_FOLDER)
        if folder is None:
            return make(*arguments)
        call = f"{make.__module__}.{make.__qualname__}{arguments!r}"
        path = Path(folder) / f"{hashlib.sha256(call.encode()).hexdigest()}.pickle"
        if path.exists():
            found: R = pickle.loads(path.read_bytes())
            return found
        made = make(*arguments)
        own = path.with_suffix(f".{os.getpid()}")  # both workers may be at it
        own.write_bytes(pickle.dumps(made))
        own.replace(path)
        return made

    return kept


def compile_each_program_once() -> None:
    """From when SPU is loaded, keep what its compiler makes of a program: it takes a tenth of a second for the least.

    SPU has a cache of its own, by the number of the source in memory, in which nothing is ever found again.
    """
    libspu: Any = sys.modules.get("spu.libspu")
    if libspu is None or hasattr(libspu.compile, "kept"):
        return
    import jaxlib.xla_client
    import jaxlib.xla_extension

    compiler: Any = libspu.compile
    kept: dict[Any, Any] = {}
    form = jaxlib.xla_extension.HloPrintOptions()
    form.print_large_constants = True

    def compile(source: Any, options: Any) -> Any:
        text = jaxlib.xla_client.XlaComputation(source.ir_txt).get_hlo_module().to_string(form)
        key = text, tuple(source.input_visibility), id(options)
        if key not in kept:
            kept[key] = compiler(source, options)
        return kept[key]

    compile.kept = kept  # type: ignore[attr-defined]
    libspu.compile = compile


def lower_in_one_context() -> None:
    """From when JAX is loaded, keep a thread's MLIR context: it makes one for each function, which takes as long as a
    small function does."""
    mlir: Any = sys.modules.get("jax._src.interpreters.mlir")
    if mlir is None or hasattr(mlir.make_ir_context, "kept"):
        return
    make = mlir.make_ir_context
    kept = threading.local()

    def one_context() -> Any:
        if not hasattr(kept, "context"):
            kept.context = make()
        return kept.context

    one_context.kept = kept  # type: ignore[attr-defined]
    mlir.make_ir_context = one_context
