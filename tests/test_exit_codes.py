"""How commands end."""

from __future__ import annotations

import pytest

from aero_compile.errors import InputError
from aero_compile.exit_codes import exit_code


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("code", [0, 1])
def test_a_command_that_ends_keeps_its_code(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: code) == code
    assert capsys.readouterr() == ("", "")


def test_errors_of_ours_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raising(InputError("no such recipe"))) == 2
    assert capsys.readouterr() == ("", "error: no such recipe\n")


@pytest.mark.parametrize(("kept", "said"), [("", "interrupted"), ("f.json has it", "interrupted; f.json has it")])
def test_an_interruption_says_what_is_left(kept: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raising(KeyboardInterrupt()), kept) == 130
    assert capsys.readouterr() == ("", f"\n{said}\n")


def test_bugs_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)
