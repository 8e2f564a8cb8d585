"""A run with several environments: it trains, logs and evaluates each, and is evaluated from run.json."""

import json
from pathlib import Path

import pytest
import torch
from letter_trainer import flat_weights, make_config, played_in
from mixed_games import ROWS, Lamp, Shop, speaker
from run_g2po import outcome

from g2po_trl import G2POTrainer, tasks_dataset
from g2po_trl.runs.run_json import read_run
from g2po_trl.trajectory import read_jsonl
from g2po_trl.utils.errors import G2POError

HELPERS = Path(__file__).parents[1] / "helpers"
NAMES = ("lamp", "shop", "speaker")
LIMITS = {"speaker": {"max_turns": 2}, "shop": {"max_tool_calls": 3}}


def make(model, folder, rows=ROWS, **options):
    args = make_config(folder, **{"max_turns": 4, "max_completion_length": 4, "max_steps": 3, **options})
    dataset = tasks_dataset(rows)
    games = {"environment_factory": {"lamp": Lamp, "shop": Shop}, "agent": {"speaker": speaker}}
    return G2POTrainer(str(model), args, dataset, tasks_dataset(rows[:6]), **games)


def test_it_trains_logs_evaluates_and_is_evaluated_again(tmp_path, tiny_model_dir, monkeypatch, capsys):
    run = tmp_path / "run"
    options = {"num_generations": 4, "per_device_train_batch_size": 24, "eval_strategy": "steps", "eval_steps": 3}
    options |= {"eval_temperature": 0.0, "metric_for_best_model": "reward/lamp"}
    trainer = make(tiny_model_dir, run, environment_limits=LIMITS, **options)
    before = flat_weights(trainer)
    trainer.train()
    trainer.save_model()
    trainer.close()
    assert not torch.equal(before, flat_weights(trainer))
    # Groups are of one environment each, and the graph has a node for each task's first state.
    played = played_in(trainer)
    groups = [{(one.environment, one.task_id) for one in played[start : start + 4]} for start in range(0, 24, 4)]
    assert all(len(group) == 1 for group in groups)
    assert {one.environment for one in played} <= {*NAMES}
    assert all(len(one.steps) == 2 for one in played if one.environment != "shop")
    described = read_run(run)
    assert [*described["environment"]["kwargs"]["environments"]] == ["speaker", "lamp", "shop"]
    assert described["play"]["environment_limits"] == LIMITS and described["play"]["history"] is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    flags = ("--output", "again", "--num-environment-workers=1")
    code, said, errors = outcome(capsys, "evaluate", "--model", str(run), *flags)
    assert code == 0 and all(name in said for name in NAMES), errors
    settings = json.loads(Path("again/settings.json").read_text())
    assert settings["environment_limits"] == LIMITS and settings["history"] is None
    (file,) = run.glob("trajectories/eval-*3.jsonl")
    first, again = (
        {t.task_id: (t.environment, t.outcome, [step.prompt_ids for step in t.steps]) for t in read_jsonl(path)}
        for path in (file, "again/trajectories/direct-0.jsonl")
    )
    assert first == again


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(G2POError, match="environment is None"):
        make("no/model", tmp_path, [*ROWS, {"seed": 1}])
    with pytest.raises(G2POError, match="lamb"):
        make("no/model", tmp_path, environment_limits={"lamb": {"max_turns": 2}})
