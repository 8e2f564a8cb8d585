"""A run with several environments: it trains, logs and evaluates each, and is evaluated and checked from run.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer  # noqa: F401  (its folder is on the path)
from letter_trainer import make_config
from mixed_games import ROWS, Lamp, Shop, speaker
from run_g2po import outcome

from g2po_trl import G2POTrainer, tasks_dataset
from g2po_trl.runs.run_json import read_run
from g2po_trl.trajectory import read_jsonl
from g2po_trl.utils.errors import G2POError

HELPERS = Path(__file__).parents[1] / "helpers"
LIMITS = {"speaker": {"max_turns": 2}, "shop": {"max_tool_calls": 3}}


def make(model, folder, rows=ROWS, **options):
    args = make_config(folder, **{"max_turns": 4, "max_completion_length": 4, "max_steps": 3, **options})
    dataset = tasks_dataset(rows)
    games = {"environment_factory": {"lamp": Lamp, "shop": Shop}, "agent": {"speaker": speaker}}
    return G2POTrainer(str(model), args, dataset, tasks_dataset(rows[:6]), **games)


def test_it_trains_logs_evaluates_and_is_evaluated_and_checked_again(tmp_path, tiny_model_dir, monkeypatch, capsys):
    run = tmp_path / "run"
    trainer = make(
        tiny_model_dir,
        run,
        environment_limits=LIMITS,
        num_generations=4,
        per_device_train_batch_size=24,
        eval_strategy="steps",
        eval_steps=3,
        eval_temperature=0.0,
        logging_steps=1,
        metric_for_best_model="reward/lamp",
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    trainer.save_model()
    trainer.close()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    # Groups are of one environment each, and the graph has a node for each task's first state.
    played = list(read_jsonl(run / "trajectories" / "train-000001.jsonl"))
    groups = [{(one.environment, one.task_id) for one in played[start : start + 4]} for start in range(0, 24, 4)]
    assert all(len(group) == 1 for group in groups)
    assert {one.environment for one in played} <= {"lamp", "shop", "speaker"}
    assert all(len(one.steps) == 2 for one in played if one.environment != "shop")
    lines = [entry for entry in trainer.state.log_history if "episode/reward" in entry]
    for entry in lines:
        seen = [name for name in ("lamp", "shop", "speaker") if f"episode/reward/{name}" in entry]
        assert seen and all(f"episode/success_rate/{name}" in entry for name in seen)
    one = lines[0]
    of_lamp = [trajectory.reward for trajectory in played if trajectory.environment == "lamp"]
    assert not of_lamp or one["episode/reward/lamp"] == pytest.approx(sum(of_lamp) / len(of_lamp))
    (evaluated,) = [entry for entry in trainer.state.log_history if "eval_success_rate" in entry]
    assert {
        f"eval_{name}/{of}" for name in ("success_rate", "reward", "turns") for of in ("lamp", "shop", "speaker")
    } <= {*evaluated}
    described = read_run(run)
    assert [*described["environment"]["kwargs"]["environments"]] == ["speaker", "lamp", "shop"]
    assert described["play"]["environment_limits"] == LIMITS and described["play"]["history"] is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    code, said, errors = outcome(
        capsys, "evaluate", "--model", str(run), "--output", "again", "--num-environment-workers=1"
    )
    assert code == 0, errors
    assert all(name in said for name in ("lamp", "shop", "speaker"))
    settings = json.loads(Path("again/settings.json").read_text())
    assert settings["environment_limits"] == LIMITS and settings["history"] is None
    (file,) = run.glob("trajectories/eval-*3.jsonl")
    first, again = (
        {one.task_id: one for one in read_jsonl(path)} for path in (file, "again/trajectories/direct-0.jsonl")
    )
    assert first.keys() == again.keys()
    for name, one in again.items():
        assert one.environment == first[name].environment and one.outcome == first[name].outcome
        assert [step.prompt_ids for step in one.steps] == [step.prompt_ids for step in first[name].steps]
    code, said, errors = outcome(capsys, "check", str(run), "--episodes", "4")
    assert code == 0, (said, errors)
    assert all(f"{name}: " in said for name in ("lamp", "shop", "speaker")) and "Next: g2po evaluate" in said
    task = '{"environment": "lamp", "seed": 1}'
    code, said, errors = outcome(capsys, "play", "--model", str(run), "--task", task)
    assert code == 0 and "--- prompt 1, " in said and " after 2 steps, reward" in said, (said, errors)


@pytest.mark.parametrize(
    ("rows", "options", "named"),
    [
        ([*ROWS, {"seed": 1}], {}, "environment is None"),
        (ROWS, {"environment_limits": {"lamb": {"max_turns": 2}}}, "environment_limits\\['lamb'\\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path, rows, options, named):
    with pytest.raises(G2POError, match=named):
        make("no/model", tmp_path, rows, **options)


def test_two_ranks_log_and_train_what_one_does(tmp_path, tiny_model_dir):
    """Whole groups are on one rank; metrics by environment are over all ranks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, torch\n"
        "from pathlib import Path\n"
        "from letter_trainer import make_config\n"
        "from mixed_games import ROWS, Lamp, Shop, speaker\n"
        "from g2po_trl import G2POTrainer, tasks_dataset\n"
        "model, output = sys.argv[1:]\n"
        "size = 24 // int(os.environ.get('WORLD_SIZE', 1))\n"
        "args = make_config(output, per_device_train_batch_size=size, max_completion_length=4, max_steps=2, top_k=1,\n"
        "                   optim='sgd', learning_rate=1e-2, max_turns=4, shuffle_dataset=False, logging_steps=1,\n"
        "                   max_tool_calls=3, beta=0.1)\n"
        "games = {'environment_factory': {'lamp': Lamp, 'shop': Shop}, 'agent': {'speaker': speaker}}\n"
        "def advantages(graph):\n"
        "    return graph.position - 0.3 * graph.trajectory + graph.returns - graph.returns.mean()\n"
        "trainer = G2POTrainer(model, args, tasks_dataset(ROWS), advantage_fn=advantages, **games)\n"
        "trainer.train()\n"
        "trainer.close()\n"
        "rank = trainer.accelerator.process_index\n"
        "torch.save([p.detach() for p in trainer.model.parameters()], f'{output}/weights-{rank}.pt')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HELPERS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("WORLD_SIZE", None)
    for ranks in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launch, str(script), str(tiny_model_dir), str(tmp_path / str(ranks))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    alone, first, second = (
        torch.load(tmp_path / name) for name in ("1/weights-0.pt", "2/weights-0.pt", "2/weights-1.pt")
    )
    for one, of_first, of_second in zip(alone, first, second):
        torch.testing.assert_close(one, of_first, rtol=0, atol=1e-6)
        assert torch.equal(of_first, of_second)
    logs = [[json.loads(line) for line in (tmp_path / n / "log.jsonl").open()] for n in ("1", "2")]
    for one, other in zip(*([entry for entry in log if "episode/reward" in entry] for log in logs), strict=True):
        names = [name for name in one if name.startswith("episode/")]
        assert sum("/lamp" in name or "/shop" in name or "/speaker" in name for name in names) == 9
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names})
