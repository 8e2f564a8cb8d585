"""What is logged when, the best checkpoint is the one that wins, and a run that comes apart is stopped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from letter_trainer import TASKS
from safetensors.torch import load_file
from transformers import TrainerControl

from g2po_trl.runs.callbacks import CollapseStoppingCallback, LogFile
from g2po_trl.runs.iterations import load_log
from g2po_trl.utils.json import write_json_lines


@pytest.mark.parametrize(("logging_steps", "eval_steps"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_log_lines_and_evaluations_anywhere_in_an_iteration(make_trainer, tmp_path, capsys, logging_steps, eval_steps):
    """Two optimizer steps an iteration: the iteration's metrics are logged once, an evaluation logs itself alone."""
    options = {"logging_steps": logging_steps, "eval_strategy": "steps", "eval_steps": eval_steps}
    options |= {"steps_per_generation": 2, "per_device_train_batch_size": 4, "eval_dataset": TASKS.select(range(2))}
    trainer = make_trainer(max_steps=6, **options)
    trainer.train()
    history = trainer.state.log_history
    logged = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert logged == json.loads(json.dumps(history)), "every entry at once"
    evaluations = [entry for entry in history if "eval_success_rate" in entry]
    assert len(evaluations) == 6 // eval_steps
    about = {"epoch", "step", "num_tokens"}
    assert {name for entry in evaluations for name in entry if not name.startswith("eval_")} <= about
    iterations = [entry for entry in history if "episode/success_rate" in entry]
    # A line inside an iteration has its rollout; every third step, a line holds one or two iterations.
    assert len(iterations) == (2 if logging_steps == 3 else 3)
    assert all(name in entry for entry in iterations for name in ("time/rollout", "kl", "episode/turns"))
    assert sum("time/update" in entry for entry in history) == (2 if logging_steps == 3 else 3)
    out = capsys.readouterr().out
    printed = [line for line in out.splitlines() if line.startswith("iteration")]
    assert [int(line.split()[1].split("/")[0]) for line in printed] == ([2, 3] if logging_steps == 3 else [1, 2, 3])
    assert out.count("eval at step") == len(evaluations)


def test_the_log_file_goes_on_at_the_checkpoint_and_until_the_folder_is_another_runs(tmp_path):
    path, folder = tmp_path / "log.jsonl", SimpleNamespace(path=tmp_path, is_ours=True)
    state = SimpleNamespace(log_history=[{"step": 1}], is_world_process_zero=True)
    path.write_text(before := '{"step": 1}\n{"step": 2}\n{"ste')
    log = LogFile(folder)
    log.on_log(None, state, None)  # before training: the folder may be another run's
    assert path.read_text() == before
    log.on_train_begin(None, state, None)
    state.log_history.append({"step": 2, "kl": float("nan")})
    log.on_log(None, state, None)
    folder.is_ours = False
    log.on_log(None, state, None)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "kl": null}\n'


def test_the_update_joins_its_rollout(tmp_path):
    played = {"episode/success_rate": 0.5}
    lines = [{"step": 3, **played}, {"step": 6, **played, "time/update": 1.0}, {"step": 9, "time/update": 2.0}, {}]
    write_json_lines(tmp_path / "log.jsonl", [*lines, {"step": 10, **played}])
    found = load_log(tmp_path)
    assert [(entry["step"], entry.get("time/update")) for entry in found] == [(3, 1.0), (6, 2.0), (10, None)]


def test_the_best_checkpoint_wins(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 4, "eval_temperature": 1.0}
    trainer = make_trainer(eval_dataset=TASKS, max_steps=8, max_completion_length=1, learning_rate=5e-2, **options)
    trainer.train()
    success = {entry["step"]: entry["success_rate"] for entry in trainer.folder.evaluations}
    assert list(success) == [2, 4, 6, 8] and len(set(success.values())) > 1
    best = max(success, key=success.get)  # the first of equals
    assert trainer.state.best_global_step == best and trainer.state.best_metric == success[best]
    folder = tmp_path / "out" / f"checkpoint-{best}"
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {folder.name, "checkpoint-8"}
    ours = dict(trainer.model.named_parameters())
    assert all(torch.equal(ours[name], one) for name, one in load_file(folder / "model.safetensors").items())
    state = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]) == Path(trainer.state.best_model_checkpoint) == folder


@pytest.mark.parametrize(
    ("valid", "stopped_at"),
    [
        ([1, 0.1, 1, 0.1, 1, 0.5, 0.5], None),
        ([1, 1, 0.3, 0.3, 0.3, 0.3, 0.3], 5),
        ([0.1] * 4, None),
        ([0.1] * 5, 4),
        ([float("nan"), None, *[0.1] * 5], 6),  # an outage at first
    ],
)
def test_when_a_run_counts_as_collapsed(valid, stopped_at):
    """By the mean of five log lines; other lines, as of evaluations, do not count."""
    callback, history, stopped = CollapseStoppingCallback(0.5), [], None
    for index, ratio in enumerate(valid):
        history += [{"episode/valid_action_ratio": ratio, "episode/success_rate": 0.5}, {"eval_success_rate": 0.0}]
        control = TrainerControl()
        state = SimpleNamespace(log_history=history, global_step=index, is_world_process_zero=True)
        callback.on_log(SimpleNamespace(save_strategy="no"), state, control, logs=history[-2])
        stopped = index if stopped is None and control.should_training_stop else stopped
    assert stopped == stopped_at


def test_a_collapsed_run_stops_with_a_checkpoint(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "max_completion_length": 1, "min_valid_action_ratio": 1.0}
    trainer = make_trainer(max_steps=20, **options)
    trainer.train()
    assert trainer.state.global_step == 5, "a random model says more than letters"
    assert (tmp_path / "out" / "checkpoint-5").is_dir()
