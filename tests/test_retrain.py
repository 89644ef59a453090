"""Retraining: what a run writes, resuming, determinism, NaN, bad input, and the command line."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import aero_compile
from aero_compile.entropy import EntropyRegularizedModel
from aero_compile.errors import InputError, OutputDirError, TrainingError
from aero_compile.retrain import RetrainArguments, RetrainOptions, RetrainResult, main, retrain
from aero_compile.training import models
from aero_compile.training.data import Blocks, Documents, TrainingData, prepare
from aero_compile.training.hub import HubTarget
from aero_compile.training.loop import RegularizedTrainer, perplexity
from aero_compile.training.models import find_model, find_shape, parse_overrides
from aero_compile.training.nonfinite import first_non_finite
from aero_compile.training.options import check_weights_type
from aero_compile.training.run_directory import RunDirectory

CONTEXT, VOCABULARY = 16, 300


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def no_collection() -> Any:
    """At the end of training accelerate looks at every object of the process: those of all tests before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="module")
def blocks() -> TrainingData:
    texts = [f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 5) for i in range(60)]
    documents = Documents("functions", datasets.Dataset.from_dict({"text": texts}))
    return prepare(documents, context=CONTEXT, vocab_size=VOCABULARY, max_validation_tokens=256)


def tiny_gpt2() -> nn.Module:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": VOCABULARY, "n_positions": CONTEXT}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**shape, **tokens))
    return model


def factory() -> nn.Module:
    """Named on the command line as tests.test_retrain:factory."""
    return tiny_gpt2()


@pytest.fixture(scope="module")
def baseline() -> aero_compile.TransformedModel:
    """Captured once; what the tests need is transformed from it."""
    return aero_compile.transform(tiny_gpt2(), "baseline")


@pytest.fixture(scope="module")
def softmax_only(baseline: Any) -> aero_compile.TransformedModel:
    return aero_compile.transform(baseline, "softmax_only")


def arguments(folder: Path, **changes: Any) -> RetrainArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 2,
        "eval_steps": 4,
        "save_steps": 4,
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 3e-3,
    }
    return RetrainArguments(**(settings | changes))


def options(**changes: Any) -> RetrainOptions:
    settings: dict[str, Any] = {"entropy_weight": 0.1, "entropy_blocks": 6}
    return RetrainOptions(**(settings | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, blocks: TrainingData, softmax_only: Any) -> RetrainResult:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return retrain(options(), arguments(folder), model=softmax_only, datasets=blocks)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# -- what a run writes -----------------------------------------------------------------------------------


def test_run_directory_of_a_finished_run(finished: RetrainResult, blocks: TrainingData) -> None:
    folder = finished.output_dir
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "activations.jsonl",
        "artifact",
        "checkpoint-4",
        "checkpoint-8",
        "entropies.jsonl",
        "metrics.jsonl",
        "parameters.jsonl",
        "run.json",
    }

    metrics = lines(folder / "metrics.jsonl")
    training = [m for m in metrics if "loss" in m]
    assert [m["step"] for m in training] == [1, 2, 4, 6, 8]
    for m in training:
        assert m["loss"] == pytest.approx(m["ce_loss"] + 0.1 * m["penalty"], rel=1e-4)
        assert m["tokens"] == m["step"] * 4 * CONTEXT
        assert {"learning_rate", "grad_norm", "time", "seconds", "epoch"} <= m.keys()
    held_out = [m for m in metrics if "eval_loss" in m]
    assert [m["step"] for m in held_out] == [4, 8]
    assert held_out[-1]["perplexity"] == pytest.approx(math.exp(finished.eval_loss))
    assert held_out[-1]["eval_loss"] < training[0]["ce_loss"]
    assert finished.history == metrics

    entropies = lines(folder / "entropies.jsonl")
    assert [(e["step"], e["event"]) for e in entropies] == [
        (0, "start"),
        *[(1, "log"), (2, "log"), (4, "log"), (4, "eval"), (6, "log"), (8, "log"), (8, "eval")],
        (8, "end"),
    ]
    for e in entropies:
        assert np.array(e["entropies"]).shape == (2, 2)
    assert entropies[0]["entropies"] == finished.entropies_before
    assert entropies[-1]["entropies"] == finished.entropies_after
    assert finished.entropies_before != finished.entropies_after

    parameters = lines(folder / "parameters.jsonl")
    assert [(p["step"], p["event"]) for p in parameters] == [(e["step"], e["event"]) for e in entropies]
    expected = finished.model.get_parameter("scaled_ffn.1.alpha").item()
    assert parameters[-1]["scalars"]["scaled_ffn.1.alpha"] == pytest.approx([expected] * 3, rel=1e-5)
    assert parameters[0]["scalars"]["scaled_ffn.1.alpha"] == [1.0] * 3
    temperatures = [t.mean(-1) for t in finished.model.temperatures().values()]
    assert np.allclose(parameters[-1]["temperatures"], torch.stack(temperatures), rtol=1e-5)
    assert np.array(parameters[0]["thresholds"]).tolist() == [[0.5, 0.5]] * 2
    assert parameters[-1]["thresholds"] != parameters[0]["thresholds"]
    activations = lines(folder / "activations.jsonl")
    assert [(a["step"], a["event"]) for a in activations] == [(0, "start"), (4, "eval"), (8, "eval"), (8, "end")]
    assert all(rms > 0 for a in activations for rms in a["stream"]["rms"])
    assert all(m["tokens_per_second"] > 0 for m in training[1:])

    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["seed"] == 42
    assert record["identity"]["tokens"] == blocks.fingerprint
    assert "softmax-temperature" in record["identity"]["recipe"]
    assert {"python", "torch", "transformers", "aero_compile", "datasets"} <= record["versions"].keys()
    assert record["options"]["gamma"] == 0.1
    assert record["training_arguments"]["max_steps"] == 8


def test_reported_loss_is_that_of_the_saved_model(finished: RetrainResult, blocks: TrainingData) -> None:
    loaded = aero_compile.load(finished.output_dir / "artifact").eval()
    losses = []
    with torch.no_grad():
        for i in range(len(blocks.validation)):
            ids = blocks.validation[i]["input_ids"][None]
            logits = loaded(ids).logits
            losses.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
            assert torch.equal(logits, finished.model(ids).logits)
    assert float(torch.stack(losses).mean()) == pytest.approx(finished.eval_loss, rel=1e-5)
    assert not finished.model.training

    from aero_compile.training.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(finished.output_dir / "artifact")
    assert tokenizer("def f(x):")["input_ids"] == blocks.tokenizer("def f(x):")["input_ids"]
    document = json.loads((finished.output_dir / "artifact" / "aero_compile.json").read_text())
    assert document["provenance"]["eval_loss"] == finished.eval_loss
    assert document["provenance"]["tokens"] == blocks.fingerprint


def test_thresholds_and_new_parameters_are_trained(finished: RetrainResult, softmax_only: Any) -> None:
    from safetensors.torch import load_file

    stored = load_file(finished.output_dir / "checkpoint-8" / "model.safetensors")
    assert stored["thresholds"].shape == (2, 2)
    assert not torch.equal(stored["thresholds"], torch.full((2, 2), 0.5))
    assert "model.lm_head.weight" not in stored
    before = weights(softmax_only)
    for name, after in weights(finished.model).items():
        assert not torch.equal(before[name], after), name


def test_measured_entropies_are_the_models(finished: RetrainResult, blocks: TrainingData) -> None:
    ids = torch.stack([blocks.validation[i]["input_ids"] for i in range(6)])
    with torch.no_grad():
        entropies = finished.model(ids, output_entropies=True).entropies
    expected = torch.stack([layer.mean((0, 2)) for layer in entropies])
    assert torch.allclose(expected, torch.tensor(finished.entropies_after), atol=1e-6)


def test_same_seed_same_run_and_other_seed_other_run(
    finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    again = retrain(options(), arguments(tmp_path / "again"), model=softmax_only, datasets=blocks)
    assert same_weights(again.model, finished.model)
    assert again.eval_loss == finished.eval_loss
    assert again.entropies_after == finished.entropies_after
    losses = [[m["loss"] for m in result.history if "loss" in m] for result in (again, finished)]
    assert losses[0] == losses[1]
    other = retrain(options(), arguments(tmp_path / "other", seed=7), model=softmax_only, datasets=blocks)
    assert not same_weights(other.model, finished.model)


# -- stopping and resuming -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, blocks: TrainingData, softmax_only: Any) -> Path:
    """A run that was interrupted in its seventh step, after checkpoint-4."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    step = RegularizedTrainer.training_step

    def interrupt(self: Any, *args: Any, **more: Any) -> Any:
        if self.state.global_step == 6:
            raise KeyboardInterrupt
        return step(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegularizedTrainer, "training_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retrain(options(), arguments(folder), model=softmax_only, datasets=blocks)
    return folder


def copied(folder: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(folder, target)
    return target


def test_resume_gives_what_an_uninterrupted_run_gives(
    stopped: Path, finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    folder = copied(stopped, tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    assert lines(folder / "metrics.jsonl")[-1]["step"] == 6
    result = retrain(options(resume="last"), arguments(folder), model=softmax_only, datasets=blocks)
    assert same_weights(result.model, finished.model)
    assert result.eval_loss == finished.eval_loss
    assert result.entropies_before == finished.entropies_before
    assert result.entropies_after == finished.entropies_after

    def told(history: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(m["step"], m.get("loss"), m.get("eval_loss"), m.get("tokens")) for m in history]

    assert told(result.history) == told(finished.history)
    for file in ("entropies.jsonl", "parameters.jsonl", "activations.jsonl"):
        assert lines(folder / file) == lines(finished.output_dir / file)
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished"
    assert len(record["sessions"]) == 2


def test_vectors_of_spectral_norms_are_resumed(
    blocks: TrainingData, baseline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that training updates are in the checkpoint; where it goes on, σ is what it was."""
    model = aero_compile.transform(baseline, "SM+SNorm(QK+FFN)")
    sizes = {"max_steps": 4, "save_steps": 2, "eval_steps": 4}
    whole = retrain(options(), arguments(tmp_path / "whole", **sizes), model=model, datasets=blocks)
    step = RegularizedTrainer.training_step

    def interrupt(self: Any, *args: Any, **more: Any) -> Any:
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RegularizedTrainer, "training_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retrain(options(), arguments(tmp_path / "run", **sizes), model=model, datasets=blocks)
    resumed = retrain(options(resume="last"), arguments(tmp_path / "run", **sizes), model=model, datasets=blocks)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.model.state_dict().items())
    assert resumed.eval_loss == whole.eval_loss
    start, end = (m.get_buffer("spectral_norm.0.q.u") for m in (model, whole.model))
    assert not torch.equal(start, end)


def test_half_written_checkpoint_is_not_resumed_from(stopped: Path, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path / "run")
    (folder / "checkpoint-6").mkdir()
    (folder / "checkpoint-6" / "model.safetensors").write_bytes(b"half")
    assert RunDirectory(folder).last_checkpoint() == folder / "checkpoint-4"
    (folder / "checkpoint-4" / "complete.json").unlink()
    assert RunDirectory(folder).last_checkpoint() is None


NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("file", NEEDED)
@pytest.mark.parametrize("harm", ["lost", "cut in half", "one bit"])
def test_a_damaged_checkpoint_is_passed_over(
    file: str, harm: str, finished: RetrainResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer would go on without the file, or end in a traceback; the older checkpoint is whole."""
    folder = copied(finished.output_dir, tmp_path / "run")
    damaged = folder / "checkpoint-8" / file
    content = damaged.read_bytes()
    if harm == "lost":
        damaged.unlink()
    else:
        changed = bytes([content[-1] ^ 1])
        damaged.write_bytes(content[: len(content) // 2] if harm == "cut in half" else content[:-1] + changed)
    with caplog.at_level("WARNING", logger="aero_compile.retrain"):
        assert RunDirectory(folder).last_checkpoint() == folder / "checkpoint-4"
    assert "checkpoint-8" in caplog.text
    assert file in caplog.text
    with pytest.raises(OutputDirError, match=f"checkpoint-8.* {file}"):
        RunDirectory(folder).resume_point(str(folder / "checkpoint-8"))
    (folder / "checkpoint-4" / file).unlink()
    with pytest.raises(OutputDirError, match="no checkpoint can be resumed from"):
        RunDirectory(folder).resume_point("last")


def test_resume_takes_the_older_checkpoint_where_the_newest_is_damaged(
    finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    folder = copied(finished.output_dir, tmp_path / "run")
    (folder / "checkpoint-8" / "optimizer.pt").unlink()
    result = retrain(options(resume="last"), arguments(folder), model=softmax_only, datasets=blocks)
    assert same_weights(result.model, finished.model)
    assert result.eval_loss == finished.eval_loss
    assert RunDirectory(folder).last_checkpoint() == folder / "checkpoint-8"


def test_checkpoints_without_an_optimizer_are_not_resumed_from(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "run", max_steps=1, save_steps=1, eval_strategy="no", save_only_model=True)
    retrain(options(), args, model=softmax_only, datasets=blocks)
    with pytest.raises(OutputDirError, match="written without the optimizer"):
        RunDirectory(tmp_path / "run").resume_point("last")


def test_old_checkpoints_go_when_the_new_one_is_whole(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", max_steps=4, save_steps=1, eval_strategy="no", save_total_limit=2)
    retrain(options(), args, model=softmax_only, datasets=blocks)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert args.save_total_limit == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-4}, "learning_rate was 0.003, now 0.0001"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size was 4, now 2"),
        ({"weight_decay": 0.0}, "weight_decay was 0.1, now 0.0"),
        ({"optim": "sgd"}, "optim was 'adamw_torch.*', now 'sgd'"),
        ({"lr_scheduler_type": "constant"}, "lr_scheduler_type was 'cosine', now 'constant'"),
        ({"warmup_steps": 3}, "warmup_steps was"),
        ({"max_steps": 9}, "max_steps was 8, now 9"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"bf16": True}, "bf16 was False, now True"),
    ],
)
def test_settings_that_matter_cannot_change_on_resume(
    change: dict[str, Any], message: str, stopped: Path, blocks: TrainingData, softmax_only: Any
) -> None:
    before = listing(stopped)
    with pytest.raises(OutputDirError, match=message):
        retrain(options(resume="last"), arguments(stopped, **change), model=softmax_only, datasets=blocks)
    assert listing(stopped) == before


def test_settings_that_may_change_are_recorded_with_their_step(
    stopped: Path, finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    folder = copied(stopped, tmp_path / "run")
    result = retrain(options(resume="last"), arguments(folder, logging_steps=1), model=softmax_only, datasets=blocks)
    assert same_weights(result.model, finished.model)
    sessions = json.loads((folder / "run.json").read_text())["sessions"]
    assert [(each["step"], each["changed"]) for each in sessions] == [(0, {}), (4, {"logging_steps": [2, 1]})]


def test_a_run_of_constant_learning_rate_can_be_lengthened(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    flat: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_strategy": "no", "save_steps": 2}
    whole = retrain(options(), arguments(tmp_path / "whole", max_steps=5, **flat), model=softmax_only, datasets=blocks)
    first = arguments(tmp_path / "run", max_steps=3, **flat)
    retrain(options(), first, model=softmax_only, datasets=blocks)
    longer = arguments(tmp_path / "run", max_steps=5, **flat)
    result = retrain(options(resume="last"), longer, model=softmax_only, datasets=blocks)
    assert same_weights(result.model, whole.model)
    assert result.eval_loss == whole.eval_loss


def test_a_run_that_had_no_artifact_yet_ends_as_if_never_stopped(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    """Stopped behind the last checkpoint: no step is left, whatever the length of an epoch."""
    import shutil

    args = arguments(tmp_path / "run", max_steps=5, save_steps=5, eval_steps=2)
    whole = retrain(options(), args, model=softmax_only, datasets=blocks)
    for _ in range(2):
        shutil.rmtree(tmp_path / "run" / "artifact")
        result = retrain(options(resume="last"), args, model=softmax_only, datasets=blocks)
        assert same_weights(result.model, whole.model)
        assert result.eval_loss == whole.eval_loss
        assert [m["step"] for m in result.history if "loss" in m] == [1, 2, 4]
        assert aero_compile.load(tmp_path / "run" / "artifact").num_layers == 2


@pytest.mark.parametrize("nothing", [{"max_steps": 0}, {"max_steps": -1, "num_train_epochs": 0}])
def test_no_steps_train_nothing(
    nothing: dict[str, Any], blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    result = retrain(options(), arguments(tmp_path / "run", **nothing), model=softmax_only, datasets=blocks)
    assert same_weights(result.model, softmax_only)
    assert math.isfinite(result.eval_loss)
    assert result.entropies_before == result.entropies_after


def test_a_full_disk_is_one_error_and_the_last_checkpoint_stays(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    write = torch.save

    def full(content: Any, target: Any, *args: Any, **more: Any) -> None:
        if "checkpoint-8" in str(target):
            raise RuntimeError("PytorchStreamWriter failed") from OSError(errno.ENOSPC, "No space left on device")
        write(content, target, *args, **more)

    monkeypatch.setattr(torch, "save", full)
    kept = r"checkpoint-8 could not be written: No space left on device .* last whole checkpoint is .*checkpoint-4"
    with pytest.raises(OutputDirError, match=kept):
        retrain(options(), arguments(tmp_path / "run"), model=softmax_only, datasets=blocks)
    assert not (tmp_path / "run" / "checkpoint-8").exists()
    monkeypatch.undo()
    result = retrain(options(resume="last"), arguments(tmp_path / "run"), model=softmax_only, datasets=blocks)
    assert result.eval_loss > 0


@pytest.mark.slow
def test_files_that_may_not_grow_end_a_command_with_one_line(corpus: Path, tmp_path: Path) -> None:
    """The same by the operating system: no file may be larger than 60 kB."""
    run = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); "
    run += "from aero_compile.retrain import main; sys.exit(main(sys.argv[1:]))"
    flags = small(corpus, "--output-dir", str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", run, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "checkpoint-2 could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_absent_logger_does_not_block_the_run_directory(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    args = arguments(tmp_path / "run", max_steps=0, report_to="tensorboard")
    with pytest.raises(InputError, match="tensorboard"):
        retrain(options(), args, model=softmax_only, datasets=blocks)
    RunDirectory(tmp_path / "run").check(resume=False)


def test_a_push_is_asked_for_before_training_and_made_of_the_artifact(
    blocks: TrainingData, softmax_only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    args = arguments(tmp_path / "mine", max_steps=0, push_to_hub=True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(InputError, match="hf auth login"):
        retrain(options(), args, model=softmax_only, datasets=blocks)
    assert not (tmp_path / "mine").exists()

    pushed: list[Any] = []
    monkeypatch.setattr(HubTarget, "check", lambda self: pushed.append(self.name))
    monkeypatch.setattr(HubTarget, "push", lambda self, folder: pushed.append(folder))
    retrain(options(), args, model=softmax_only, datasets=blocks)
    assert pushed == ["mine", tmp_path / "mine" / "artifact"]
    card = (tmp_path / "mine" / "artifact" / "README.md").read_text()
    assert "strip-layer-norm" in card
    assert "SM:4×" in card


def test_resume_where_nothing_is_starts_a_run(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "new", max_steps=1, eval_strategy="no", save_strategy="no")
    result = retrain(options(resume="last"), args, model=softmax_only, datasets=blocks)
    assert result.eval_loss > 0
    assert [e["event"] for e in lines(tmp_path / "new" / "entropies.jsonl")] == ["start", "log", "eval", "end"]


def test_a_finished_run_can_be_resumed_without_harm(
    finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    folder = copied(finished.output_dir, tmp_path / "run")
    result = retrain(options(resume="last"), arguments(folder), model=softmax_only, datasets=blocks)
    assert same_weights(result.model, finished.model)
    assert result.eval_loss == finished.eval_loss


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_output_directories_of_others_are_left_alone(
    stopped: Path, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    def refused(folder: Path, match: str, **changes: Any) -> None:
        before = listing(folder)
        with pytest.raises(OutputDirError, match=match):
            retrain(options(**changes), arguments(folder), model=softmax_only, datasets=blocks)
        assert listing(folder) == before

    folder = copied(stopped, tmp_path / "run")
    refused(folder, r"holds a training run \(interrupted\): continue it with --resume")
    refused(folder, r"another run: gamma was 0.1, now 0.3", resume="last", gamma=0.3)
    refused(folder, "lambda was 0.1, now 0.2", resume="last", entropy_weight=0.2)
    refused(folder, "no checkpoint-N folder", resume=str(tmp_path / "checkpoint-9"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    refused(foreign, "holds no training run", resume="last")
    refused(foreign, "holds no training run")
    (folder / "run.json").write_text("{")
    refused(folder, "cannot be read")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(OutputDirError, match="is a file"):
        RunDirectory(file).check(resume=False)


# -- NaN -------------------------------------------------------------------------------------------------


def test_overflow_is_named_with_its_layer(blocks: TrainingData, baseline: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(baseline)
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight").fill_(3e38)
    with pytest.raises(TrainingError, match=r"(?s)at step 1\..*layer 1.*No checkpoint") as caught:
        retrain(options(recipe="relu"), arguments(tmp_path / "run"), model=model, datasets=blocks)
    assert "transformer.h.1.mlp" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "artifact").exists()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "layer 1" in record["error"]
    failure = lines(tmp_path / "run" / "activations.jsonl")[-1]
    assert (failure["step"], failure["event"]) == (1, "failure")
    assert "transformer.h.1.mlp" in failure["where"]
    assert failure["ffn_output"]["non_finite"][0] == 0 < failure["ffn_output"]["non_finite"][1]


def test_diverging_run_stops_and_keeps_its_checkpoint(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", learning_rate=1e12, lr_scheduler_type="constant", warmup_steps=0, save_steps=1)
    with pytest.raises(TrainingError, match=r"The last good checkpoint is .*checkpoint-\d"):
        retrain(options(), args, model=softmax_only, datasets=blocks)
    checkpoint = RunDirectory(tmp_path / "run").last_checkpoint()
    assert checkpoint is not None
    from safetensors.torch import load_file

    assert all(bool(t.isfinite().all()) for t in load_file(checkpoint / "model.safetensors").values())


def test_nan_weight_and_bad_gradient_are_named(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    broken = copy.deepcopy(softmax_only)
    with torch.no_grad():
        broken.get_parameter("scaled_ffn.1.alpha").fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"the loss became NaN at step 1.*parameter scaled_ffn.1.alpha \(layer 1\)"):
        retrain(options(), arguments(tmp_path / "a"), model=broken, datasets=blocks)

    def poison(self: Any, model: Any, *args: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = step(self, model, *args, **more)
        self.model.model.get_parameter("softmax_temperature.0.log_t").grad.fill_(torch.inf)
        return loss

    step = RegularizedTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegularizedTrainer, "training_step", poison)
        with pytest.raises(TrainingError, match="the gradients became NaN or infinite at step 1"):
            retrain(options(), arguments(tmp_path / "b"), model=softmax_only, datasets=blocks)


def test_healthy_models_have_no_non_finite_place(softmax_only: Any, baseline: Any) -> None:
    ids = torch.randint(0, VOCABULARY, (2, CONTEXT))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    assert first_non_finite(softmax_only, ids, mask) is None
    assert first_non_finite(baseline, ids) is None


# -- the loop --------------------------------------------------------------------------------------------


def test_accumulation_equals_the_large_batch(blocks: TrainingData, baseline: Any, tmp_path: Path) -> None:
    model = aero_compile.transform(baseline, "SM+R")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    results = []
    for name, changes in (
        ("whole", {"per_device_train_batch_size": 8}),
        ("parts", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ):
        args = arguments(tmp_path / name, max_steps=3, optim="sgd", learning_rate=0.5, warmup_steps=0, **changes)
        results.append(retrain(options(entropy_weight=0.0), args, model=model, datasets=blocks))
    whole, parts = (weights(result.model) for result in results)
    for name in whole:
        assert torch.allclose(whole[name], parts[name], atol=1e-5), name
    logged = [[m["loss"] for m in result.history if "loss" in m] for result in results]
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert "penalty" not in results[0].history[0]


def test_weight_decay_spares_everything_but_matrices(softmax_only: Any, tmp_path: Path) -> None:
    wrapper = EntropyRegularizedModel(copy.deepcopy(softmax_only), weight=0.1)
    args = arguments(tmp_path / "x", eval_strategy="no")
    trainer = RegularizedTrainer(run=RunDirectory(tmp_path), entropy_blocks=1, model=wrapper, args=args)
    decayed = set(trainer.get_decay_parameter_names(wrapper))
    assert "model.transformer.h.0.attn.c_attn.weight" in decayed
    spared = {name for name, _ in wrapper.named_parameters()} - decayed
    for part in ("thresholds", "log_t", "alpha", "beta", "bias"):
        assert any(part in name for name in spared), part
        assert not any(part in name for name in decayed), part


def test_mixed_precision_and_listing(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", bf16=True, max_steps=2, save_strategy="no")
    chosen = options(entropy_reduction="listing", entropy_weight=1e-3)
    result = retrain(chosen, args, model=softmax_only, datasets=blocks)
    first = next(m for m in result.history if "penalty" in m)
    assert first["penalty"] > 1
    assert all(p.dtype == torch.float32 for p in result.model.parameters())


def test_half_precision_weights_are_trained_and_saved(
    finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "run", save_steps=8, eval_steps=8)
    result = retrain(options(dtype="bfloat16"), args, model=softmax_only, datasets=blocks)
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in softmax_only.parameters()} == {torch.float32}
    losses, wide = ([m["ce_loss"] for m in r.history if "ce_loss" in m] for r in (result, finished))
    assert losses == pytest.approx(wide, abs=0.01)
    assert losses[-1] < losses[0] - 0.02
    loaded = aero_compile.load(result.output_dir / "artifact")
    assert same_weights(loaded, result.model)


@pytest.mark.parametrize("half", ["weights", "autocast"])
def test_entropies_are_summed_in_float32(half: str, softmax_only: Any) -> None:
    """They are those of the attention weights as they were computed, whatever the type of these."""
    model = copy.deepcopy(softmax_only).eval()
    model = model.bfloat16() if half == "weights" else model
    ids = torch.randint(0, VOCABULARY, (3, CONTEXT))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        found = model(ids, output_entropies=True).entropies
        wide = copy.deepcopy(softmax_only).eval()(ids, output_entropies=True).entropies
    wrapper = EntropyRegularizedModel(model, weight=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        out = wrapper.train()(ids, labels=ids)
    out.loss.backward()
    assert {layer.dtype for layer in (*found, *out.entropies, out.penalty, wrapper.thresholds.grad)} == {torch.float32}
    for layer, expected in zip(found, wide, strict=True):
        assert torch.allclose(layer, expected, atol=0.02)


@pytest.mark.parametrize(
    ("flags", "message"), [({"fp16": True}, "scales gradients"), ({"adam_epsilon": 1e-8}, "--adam-epsilon")]
)
def test_float16_weights_need_fitting_flags(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for name, value in flags.items():
        setattr(args, name, value)
    with pytest.raises(InputError, match=message):
        check_weights_type(options(dtype="float16"), args)
    args.fp16, args.adam_epsilon = False, 1e-4
    check_weights_type(options(dtype="float16"), args)


def test_gradient_checkpointing_gives_the_same_run(
    finished: RetrainResult, blocks: TrainingData, softmax_only: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "run", gradient_checkpointing=True)
    result = retrain(options(), args, model=softmax_only, datasets=blocks)
    assert same_weights(result.model, finished.model)
    assert result.eval_loss == finished.eval_loss


def test_model_without_position_limit_gets_a_temperature(blocks: TrainingData, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    args = arguments(tmp_path / "run", max_steps=1, save_strategy="no")
    result = retrain(options(recipe="softmax-temperature"), args, model=model, datasets=blocks)
    assert result.model.max_positions is not None
    assert result.model.max_positions >= CONTEXT


def test_norms_are_frozen_on_training_text(blocks: TrainingData, baseline: Any, tmp_path: Path) -> None:
    recipe = "gelu-to-relu,freeze-layer-norm"
    args = arguments(tmp_path / "run", max_steps=2, save_strategy="no")
    result = retrain(options(recipe=recipe, calibration_batches=3), args, model=baseline, datasets=blocks)
    text = blocks.train.sample(3, 4)
    assert [tuple(batch.shape) for batch in text] == [(4, CONTEXT)] * 3
    expected = aero_compile.transform(baseline, recipe, calibration=text)
    for name, std in expected.named_buffers():
        if name.startswith("frozen_layer_norm."):
            assert torch.equal(result.model.get_buffer(name), std)
    assert aero_compile.census(result.model, CONTEXT).kinds == ("softmax", "relu")
    loaded = aero_compile.load(result.output_dir / "artifact")
    assert loaded.state_dict().keys() == result.model.state_dict().keys()


def test_perplexity_of_large_losses() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


# -- models and options ----------------------------------------------------------------------------------


def test_model_sources(tmp_path: Path) -> None:
    def find(name: str, **changes: Any) -> Any:
        return find_model(name, **({"from_scratch": False, "overrides": None, "context": 32} | changes))

    tiny = find("tiny", overrides="n_layer=1,n_embd=32,activation_function=relu")
    assert tiny.from_scratch
    assert tiny.positions == 128
    built = tiny.build(300, 0)
    assert (built.config.n_layer, built.config.vocab_size, built.config.activation_function) == (1, 300, "relu")

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt_neox", "num_hidden_layers": 1, "hidden_size": 64}))
    assert find(str(config)).from_scratch
    assert find(str(tmp_path)).from_scratch
    shape = find("pythia-70m", from_scratch=True)
    assert shape.positions == 2048

    model = tiny_gpt2()
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    source = find(str(tmp_path / "model"))
    assert not source.from_scratch
    assert same_weights(source.build(0, None), model)
    assert parse_overrides("a=1, b=x,c=true") == {"a": 1, "b": "x", "c": True}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("", {}, "--model is empty"),
        ("./absent.json", {}, "no such file"),
        ("no_such_module_x:make", {}, "No module named"),
        ("tests.test_retrain:absent", {}, "absent"),
        ("tests.test_retrain:CONTEXT", {}, "the factory raised TypeError"),
        ("tests.test_retrain:arguments", {}, "the factory raised"),
        ("builtins:list", {}, "returned list, not an nn.Module"),
        ("builtins:list", {"from_scratch": True}, "no --from-scratch"),
        ("tiny", {"overrides": "n_layers=3"}, "no field 'n_layers'"),
        ("tiny", {"overrides": "n_layer"}, "not name=value"),
        ("gpt2", {"overrides": "n_layer=3"}, "add --from-scratch"),
    ],
)
def test_model_names_that_cannot_be_used(name: str, changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"from_scratch": False, "overrides": None, "context": 32}
    with pytest.raises(InputError, match=message):
        find_model(name, **(settings | changes)).build(300, 0)


def test_no_network_is_noticed_at_once_and_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def unreachable(address: Any, **_: Any) -> None:
        tried.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    models._hub_answers.cache_clear()
    try:
        for load in (lambda: find("absent-org/absent").build(0, None), lambda: find_shape("absent-org/absent", 16)):
            with pytest.raises(InputError, match="Hub does not answer"):
                load()
        with pytest.raises(InputError, match=r"--from-scratch \(the shapes tiny, gpt2"):
            find("absent-org/absent").build(0, None)
    finally:
        models._hub_answers.cache_clear()
    assert len(tried) <= 1


def find(name: str) -> models.ModelSource:
    return find_model(name, from_scratch=False, overrides=None, context=16)


def test_a_census_needs_no_weights(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    assert all(find_shape(name, 16).from_scratch for name in ("gpt2", "pythia-70m", "tiny", str(tmp_path)))
    assert not find_shape("tests.test_retrain:factory", 16).from_scratch


def test_default_weight_follows_the_recipe() -> None:
    assert RetrainOptions().weight == 0.05
    assert RetrainOptions(recipe="EReg(SM+R)", entropy_reduction="listing").weight == 1e-5
    assert RetrainOptions(recipe="SM+R").weight == 0.0
    assert RetrainOptions(recipe="SM+R", entropy_weight=0.3).weight == 0.3
    assert RetrainOptions(recipe="SM+R").weight == 0.0
    assert RetrainOptions(recipe="softmax_only").weight == 0.05
    assert RetrainOptions(recipe="SM(t)+ScFFN").weight == 0.0, "the paper's label of the model trained without"
    assert RetrainOptions(recipe="EReg(SM(t)+ScFFN)").weight == 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_weight": -1.0},
        {"gamma": math.nan},
        {"threshold_init": 2.0},
        {"entropy_reduction": "mean"},
        {"context": 1},
        {"validation_fraction": 0.0},
        {"entropy_blocks": 0},
        {"calibration_batches": 0},
    ],
)
def test_options_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        RetrainOptions(**changes)


def test_data_must_fit_the_model(blocks: TrainingData, softmax_only: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run")
    long = TrainingData("long", Blocks(np.zeros(64, np.int32), 32), blocks.validation, blocks.tokenizer, "")
    with pytest.raises(InputError, match="context of 32 tokens is longer than the model's 16 positions"):
        retrain(options(), args, model=softmax_only, datasets=long)
    foreign = TrainingData("x", Blocks(np.full(64, 999), 16), blocks.validation, blocks.tokenizer, "")
    with pytest.raises(InputError, match="token id 999"):
        retrain(options(), args, model=softmax_only, datasets=foreign)
    with pytest.raises(InputError, match="give --recipe too"):
        retrain(options(temperature_init=0.1), args, model=softmax_only, datasets=blocks)
    with pytest.raises(InputError, match="has no softmax temperature"):
        retrain(options(temperature_init=0.1, recipe="SM+R"), args, model=softmax_only, datasets=blocks)
    with pytest.raises(InputError, match="--label_smoothing_factor is not supported"):
        retrain(options(), arguments(tmp_path / "run", label_smoothing_factor=0.1), model=softmax_only)
    assert not (tmp_path / "run").exists()


# -- the command line ------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.py").write_text(f"def g{i}(y):\n    return {i} * y\n" * (1 + i % 4))
    return folder


def small(corpus: Path, *more: str) -> list[str]:
    shape = ["--config-overrides", "n_layer=1,n_embd=32,n_head=2", "--context", "16", "--vocab-size", "300"]
    steps = ["--max-steps", "2", "--per_device_train_batch_size", "4", "--use-cpu", "--disable-tqdm", "true"]
    return ["--dataset", str(corpus), *shape, *steps, *more]


def test_command_line_from_text_to_artifact(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(small(corpus, "--output-dir", run, "--temperature-init", "0.1", "--lambda", "0.2")) == 0
    shown = capsys.readouterr()
    assert "perplexity" in shown.out
    model = aero_compile.load(tmp_path / "run" / "artifact")
    assert "softmax-temperature{init=0.1}" in model.recipe
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["identity"]["lambda"] == 0.2

    assert main(small(corpus, "--output-dir", run)) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    again = str(tmp_path / "again")
    continued = ["--model", f"{run}/artifact", "--output_dir", again, "--dataset", str(corpus), "--context", "16"]
    assert main([*continued, "--max_steps", "1", "--use_cpu", "--disable_tqdm", "true"]) == 0
    assert aero_compile.load(tmp_path / "again" / "artifact").recipe == model.recipe


def test_factory_on_the_command_line(corpus: Path, tmp_path: Path) -> None:
    chosen = ["--model", "tests.test_retrain:factory", "--recipe", "SM+R", "--max-steps", "1", "--use-cpu"]
    where = ["--dataset", str(corpus), "--context", "16", "--output-dir", str(tmp_path / "run")]
    assert main([*chosen, *where, "--disable-tqdm", "true"]) == 0
    assert aero_compile.load(tmp_path / "run" / "artifact").recipe == "strip-layer-norm,gelu-to-relu"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "sofmax_only"], "softmax_only"),
        (["--recipe", "scaled-ffn{gamma=1}"], "gamma"),
        (["--dataset", "absent.txt"], "absent.txt does not exist"),
        (["--context", "100000"], "tokens"),
        (["--context", "500", "--config-overrides", "n_positions=64"], "longer than the model's 64 positions"),
        (["--vocab-size", "10"], "at least 257"),
        (["--lambda", "-1"], "--lambda"),
        (["--model", "./absent"], "no such file or folder"),
        (["--tokenizer", "./absent"], "no tokenizer could be loaded"),
        (["--eval-strategy", "sometimes"], "eval"),
        (["--lr-scheduler-kwargs", "{"], "error"),
        (["--resume", "elsewhere/checkpoint-3"], "no checkpoint-N folder"),
        (["--fp16"], "--fp16 needs a GPU"),
        (["--ddp-backend", "gloo"], "torchrun"),
    ],
)
def test_bad_input_ends_with_code_2_and_no_traceback(
    flags: list[str],
    message: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        code = main([*small(corpus, "--output-dir", str(tmp_path / "run")), *flags])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "error:" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_help_tells_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("aero_compile options") < text.index("Hugging Face TrainingArguments")
    for flag in ("--lambda", "--gamma", "--resume", "--recipe", "--max-steps", "--temperature-init", "--context"):
        assert flag in text
    assert "examples:" in text
    assert "metrics.jsonl" in text


@pytest.mark.slow
def test_two_processes_train_one_model(corpus: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += ["-m", "aero_compile.retrain", "--ddp-backend", "gloo"]
    flags = small(corpus, "--output-dir", str(tmp_path / "run"), "--logging-steps", "1")
    done = subprocess.run(
        [*launch, *flags], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["tokens"] for m in metrics if "loss" in m] == [128, 256]
    assert aero_compile.load(tmp_path / "run" / "artifact").num_layers == 1
