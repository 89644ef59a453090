"""Rewrite GPT-2-like PyTorch models for private inference, retrain them, and run them in real 2PC."""

from typing import TYPE_CHECKING

from aero_compile.artifact import load, save
from aero_compile.census import Census, census
from aero_compile.entropy import entropy_regularization
from aero_compile.errors import AeroError
from aero_compile.pipeline import transform
from aero_compile.recipe import Recipe, recipes
from aero_compile.trainable import TransformedModel
from aero_compile.version import __version__

if TYPE_CHECKING:
    from aero_compile.runtime import private_inference

__all__ = [
    "AeroError",
    "Census",
    "Recipe",
    "TransformedModel",
    "__version__",
    "census",
    "entropy_regularization",
    "load",
    "private_inference",
    "recipes",
    "save",
    "transform",
]


def __getattr__(name: str) -> object:
    """Load the private runtime, with spu and jax behind it, only when it is asked for."""
    if name == "private_inference":
        from aero_compile.runtime import private_inference

        return private_inference
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
