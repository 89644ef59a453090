"""Presets: every one is a command line that can be parsed, which the user's flags replace and `--scale` shrinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import InputError
from aero_compile.retrain import main
from aero_compile.training.command_line import parse_command_line
from aero_compile.training.options import RetrainOptions
from aero_compile.training.presets import PRESETS, preset_flags
from aero_compile.training.stages import expand, parse_stages
from tests.support.tiny_runs import captured

GIVEN = {"languini": ["--dataset", "books"]}


def parsed(*arguments: str) -> tuple[Any, Any]:
    return parse_command_line([*arguments, "--output-dir", "unused", "--use-cpu"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_flag_of_a_preset_is_what_is_parsed(name: str) -> None:
    options, args = parsed("--preset", name, *GIVEN.get(name, []))
    names = {"lambda": "entropy_weight"}
    for flag, value in PRESETS[name].flags.items():
        found = getattr(options if hasattr(options, names.get(flag, flag)) else args, names.get(flag, flag))
        if flag == "lr_scheduler_kwargs":
            assert found == json.loads(str(value))
        else:
            assert found == value, flag
    assert options.preset == name


def test_the_papers_settings() -> None:
    """The section on hyperparameters, the appendix on the margin, and 1.2 billion tokens of Languini."""
    codeparrot, args = parsed("--preset", "codeparrot")
    assert (codeparrot.weight, codeparrot.temperature_init, codeparrot.gamma) == (1e-5, 0.01, 0.2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128
    languini, args = parsed("--preset", "languini", "--dataset", "books")
    assert (languini.weight, languini.temperature_init, languini.context) == (5e-5, 0.1, 512)
    tokens = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps * languini.context
    assert tokens == pytest.approx(1.2e9, rel=0.01)
    free, args = parsed("--preset", "ln-free-gpt2")
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * free.context == 2**19
    stages = parse_stages(free.stages)
    assert sum(one.steps * (1 if one.each is None else 12) for one in stages) == 300  # of 12 layers
    assert [one.text for one in expand(stages, captured())] == [
        "",
        *(
            f"freeze-layer-norm{{layers={i},norms={part},first_token=True}}"
            for part in ("ffn", "qk", "v")
            for i in (0, 1)
        ),
        "freeze-layer-norm{norms=final,first_token=True}",
    ]


def test_flags_on_the_command_line_win(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="aero_compile.retrain"):
        options, args = parsed("--preset", "codeparrot", "--context=64", "--learning_rate", "3e-4", "--scale", "0.01")
    assert (options.context, args.learning_rate, options.max_train_tokens) == (64, 3e-4, 21_000_000)
    assert options.scale == 0.01
    assert "replaced by the command line: context, learning_rate" in caplog.text
    assert "scaled by 0.01: max_train_tokens 2,100,000,000 → 21,000,000" in caplog.text
    assert "preset codeparrot: --model gpt2" in caplog.text


def test_scales_keep_shares_and_at_least_one_step() -> None:
    flags, changed = preset_flags("ln-free-gpt2", 0.1, set())
    stages = [one.steps for one in parse_stages(str(flags["stages"]))]
    assert stages == [2, 1, 1, 1, 20]
    assert any("[20, 2, 2, 3, 196] → [2, 1, 1, 1, 20], of all 300 → 58" in each for each in changed)
    # every norm keeps a step, and 58 steps need more text than a tenth of it
    assert flags["max_train_tokens"] == round(160e6 * 58 / 300)
    assert flags["warmup_steps"] == round(25 * 58 / 300)
    for scale in (0.001, 0.01, 0.3, 1.0):
        flags = preset_flags("ln-free-gpt2", scale, set())[0]
        steps = sum(one.steps * (1 if one.each is None else 12) for one in parse_stages(str(flags["stages"])))
        assert int(flags["max_train_tokens"]) >= steps * 2**19
    assert preset_flags("codeparrot", 0.1, set())[0]["warmup_steps"] == 0.05
    assert preset_flags("tiny", 1.0, set()) == (dict(PRESETS["tiny"].flags), [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "code-parrot"], "unknown"),
        (["--preset", "languini"], "needs --dataset"),
        (["--preset", "tiny", "--scale", "0"], "above 0 and at most 1"),
        (["--preset", "tiny", "--scale", "small"], "is no number"),
        (["--scale", "0.1"], "give --preset too"),
    ],
)
def test_what_is_no_preset(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parsed(*flags)


def test_a_preset_in_small_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "text"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.py").write_text(f"def g{i}(y):\n    return {i} * y\n" * (2 + i % 4), encoding="utf-8")
    flags = ["--dataset", str(corpus), "--context", "8", "--vocab-size", "270", "--use-cpu", "--disable-tqdm", "true"]
    shape = ["--config-overrides", "n_layer=1,n_embd=16,n_head=2", "--per-device-train-batch-size", "2"]
    run = ["--output-dir", str(tmp_path / "run"), "--preset", "tiny", "--scale", "0.003"]
    assert main([*run, *flags, *shape]) == 0
    assert "scaled by 0.003: max_steps 600 → 2" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (record["options"]["preset"], record["options"]["scale"], record["steps"]) == ("tiny", 0.003, 2)
    assert record["options"]["context"] == 8
    assert RetrainOptions().preset is None
