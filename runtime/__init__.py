"""Private inference of canonical graphs on SecretFlow SPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aero_compile.runtime.compilation import Compiled
    from aero_compile.runtime.costs.model import Estimate, estimate
    from aero_compile.runtime.generation.bill import Generation
    from aero_compile.runtime.generation.export import compile_generation, export_generation
    from aero_compile.runtime.generation.private import local_session, private_generate
    from aero_compile.runtime.generation.session import Session
    from aero_compile.runtime.hosts.measure import Measurement
    from aero_compile.runtime.hosts.network_spec import Network
    from aero_compile.runtime.hosts.tls import TLSConfig
    from aero_compile.runtime.inference import compile_model, export, private_inference
    from aero_compile.runtime.lowering.lower import supported_ops
    from aero_compile.runtime.operators.activations import Approximation, approximations
    from aero_compile.runtime.program import Program
    from aero_compile.runtime.tolerances import Tolerances

_HOME = {
    "Approximation": "arithmetic.approximations",
    "approximations": "arithmetic.approximations",
    "Tolerances": "arithmetic.tolerances",
    "Estimate": "costs.model",
    "estimate": "costs.model",
    "Compiled": "compilation",
    "compile_model": "inference",
    "export": "inference",
    "private_inference": "inference",
    "Generation": "generation.bill",
    "Session": "generation.session",
    "compile_generation": "generation.export",
    "export_generation": "generation.export",
    "local_session": "generation.private",
    "private_generate": "generation.private",
    "TLSConfig": "hosts.tls",
    "Measurement": "hosts.measure",
    "Network": "hosts.network_spec",
    "supported_ops": "lowering.to_jax",
    "Program": "program",
}

__all__ = [
    "Approximation",
    "Compiled",
    "Estimate",
    "Generation",
    "Measurement",
    "Network",
    "Program",
    "Session",
    "TLSConfig",
    "Tolerances",
    "approximations",
    "compile_generation",
    "compile_model",
    "estimate",
    "export",
    "export_generation",
    "local_session",
    "private_generate",
    "private_inference",
    "supported_ops",
]


def __getattr__(name: str) -> Any:
    """Load public names when they are first used: a party process needs only a few of these modules."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
