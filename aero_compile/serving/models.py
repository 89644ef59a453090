"""The model that a server compiles: a saved artifact, a GGUF file, or a folder of a Hugging Face model.

Used by `programs.py`, which keeps what was compiled of it under its digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError
from aero_compile.files import GRAPH_FILE, artifact_folder
from aero_compile.training.gguf_header import is_gguf, read_header

CONFIG_FILE = "config.json"
"""In a folder of a Hugging Face model, beside its weights."""


def model_place(source: str | Path) -> Path:
    """Return what holds the model of `source`: a GGUF file, or the folder of a model or an artifact.

    Raises:
        InputError: there is none of these.
    """
    place = artifact_folder(source)
    if is_gguf(place) or (place / GRAPH_FILE).is_file() or _is_pretrained(place):
        return place
    raise InputError(
        f"{place} holds neither programs (program.json) nor a saved artifact ({GRAPH_FILE}) nor a Hugging Face model "
        f"({CONFIG_FILE} with weights as safetensors), and is not a GGUF file (*.gguf)"
    )


def _is_pretrained(place: Path) -> bool:
    return (place / CONFIG_FILE).is_file() and any(place.glob("*.safetensors"))


def positions_of(place: Path) -> int | None:
    """Return the longest text of a model that `model_place` found, in tokens; None: any. Its weights are not read.

    Raises:
        ArtifactError, InputError: it is damaged.
    """
    if is_gguf(place):
        return read_header(place).size("context_length")
    if (place / GRAPH_FILE).is_file():
        from aero_compile.artifact import read_document

        found = read_document(place).get("max_positions")
    else:
        from aero_compile.training.setup.models import load_config

        found = getattr(load_config(str(place)), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def load_model(place: Path) -> Any:
    """Load a model that `model_place` found, captured and ready to compile.

    Raises:
        ArtifactError, InputError, UnsupportedModelError: it is damaged, or not a decoder that can be captured.
    """
    if (place / GRAPH_FILE).is_file():
        from aero_compile.artifact import load

        return load(place)
    from aero_compile.pipeline import transform
    from aero_compile.training.gguf_models import load_gguf
    from aero_compile.training.setup.models import load_pretrained

    if is_gguf(place):
        return transform(load_gguf(place), "baseline")
    # Fixed-point numbers of 64 bits hold more of a weight than bfloat16 would compute with.
    return transform(load_pretrained(str(place), "the model", use_safetensors=True).float(), "baseline")


def model_digest(place: Path) -> hashlib._Hash:
    """Return a SHA-256 of a model that `model_place` found, to which options can be added.

    Of an artifact the JSON file is enough, since it names the weights by their digest.
    """
    if (place / GRAPH_FILE).is_file():
        return hashlib.sha256((place / GRAPH_FILE).read_bytes())
    files = [place] if is_gguf(place) else [place / CONFIG_FILE, *sorted(place.glob("*.safetensors"))]
    digest = hashlib.sha256()
    for each in files:
        with each.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest
