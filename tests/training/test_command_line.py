"""The command line: what `--help` shows, unknown flags, and what a log file gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aero_compile.errors import InputError
from aero_compile.retrain import main
from aero_compile.training.setup.command_line import HELP_GROUPS, make_parser, parse_command_line


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?(?:--[\w-]+, )*(--[\w-]+)", text, re.MULTILINE))


def test_help_shows_what_matters_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    brief, everything = shown("--help", capsys=capsys), shown("--help-all", capsys=capsys)
    assert 35 <= len(flags_in(brief)) <= 52
    assert flags_in(brief) == {
        f"--{name.replace('_', '-').replace('entropy-weight', 'lambda')}"
        for names in HELP_GROUPS.values()
        for name in names
    }
    assert len(brief.splitlines()) < 250
    assert flags_in(brief) < flags_in(everything)
    every = {flag for flag in make_parser()._option_string_actions if flag.startswith("--") and "_" not in flag}
    assert every - {"--entropy-weight"} == flags_in(everything)
    for title in HELP_GROUPS:
        assert f"\n{title}:\n" in brief
    for text in (brief, everything):
        assert "HfArgumentParser" not in text
        assert "Deprecated alias" not in brief


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("--learnin-rate 1e-3", "--learning-rate"),
        ("--lamda=0.1", "--lambda"),
        ("--max_step 3", "--max-steps"),
        ("--Recipe SM+R", "--recipe"),
        ("--no-such-thing-at-all", "--no-"),
        ("--per-device-batch-size 3", "--per-device-eval-batch-size"),
        ("-o runs/x", "-h"),
    ],
)
@pytest.mark.parametrize("preset", [[], ["--preset", "codeparrot"]], ids=["", "preset"])
def test_unknown_flags_name_the_nearest(
    wrong: str, nearest: str, preset: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*preset, *wrong.split(), "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: unknown flag {re.split('[ =]', wrong)[0]} (nearest: ")
    assert nearest in error
    assert "HfArgumentParser" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("tiny --lambda 0.1", "'tiny' belongs to no flag"),
        ("--lambda 0.1 0.2", "'0.2' belongs to no flag"),
        ("--max-steps many", "--max-steps: invalid int value: 'many'"),
        ("--lambda much", "--lambda: invalid float value: 'much'"),
        ("--init best", "--init: invalid choice"),
        ("--output-dir", "--output-dir: expected one argument"),
        ("--learning-rate -1e-3", "--learning-rate must be"),
    ],
)
def test_what_cannot_be_read_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_the_parser_raises_rather_than_ends_the_process() -> None:
    with pytest.raises(InputError, match="unknown flag"):
        parse_command_line(["--reciep", "SM+R"])
