"""`benchmarks.gpu.pretrained` and `learning`: which commands are run, what a curve records and when it ends a run."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks.gpu import curves, learning, pretrained
from benchmarks.learning import comparison_stages as stages
from g2po_trl.runs.summary import at_temperature


@pytest.fixture
def args(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()

    def parse(*words):
        needed = {"output": tmp_path / "out", "start": tmp_path, "work": tmp_path / "work", "cache_dir": tmp_path}
        named = [word for name, value in needed.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["pretrained.py", *named, "--seconds", "100", *words])
        return pretrained.arguments()

    return parse


def options(command):
    """The last value of each flag, as the recipe's parser takes it."""
    flags = [number for number, word in enumerate(command) if word.startswith("--")]
    return {command[number]: command[number + 1] for number in flags}


def test_runs_are_those_of_the_comparison_on_a_gpu(args):
    given = args("--stages", "treasure", "smollm2-pilot")
    jobs = [job for job in stages.jobs_of(given.stages, None) if job.arm != stages.START]
    commands = [pretrained.command_of(job, given, workers=1) for job in jobs]
    assert len(commands) == 14
    for job, command in zip(jobs, commands, strict=True):
        found, planned = options(command), options(job.words)
        changed = {name for name, value in planned.items() if found.get(name) != value}
        assert changed <= {"--model_name_or_path", "--environment", "--max_steps", *pretrained.LEFT_OUT}
        assert found["--bf16"] == "true" and found["--use_vllm"] == "true" and found["--seed"] == str(job.seed)
        assert found["--max_steps"] == str(job.until[-1])
        assert stages.TAUGHT not in command and not any(word.startswith(stages.GAME) for word in command)
    treasure, pilot = options(commands[0]), options(commands[-1])
    assert treasure["--reach"] == "0.8" and treasure["--every"] == "50" and "--num_eval_games" not in treasure
    assert pilot["--other_eval_temperatures"] == "0.4" and pilot["--num_eval_games"] == "96"
    assert "--reach" not in pilot


def test_methods_are_compared_on_equal_terms(args):
    given = args("--stages", pretrained.METHODS, "--panels_take", "40")
    jobs = pretrained.jobs_of(given.stages, None)
    assert len({(job.arm, job.seed) for job in jobs}) == len(jobs) == 32
    found = [options(pretrained.command_of(job, given, workers=1)) for job in jobs]
    own = {"--advantage_estimator", "--value_lambda", "--seed", "--output_dir", "--findings"}
    shared = [{name: value for name, value in one.items() if name not in own} for one in found]
    assert all(one == shared[0] for one in shared) and shared[0]["--panels_take"] == "40.0"
    assert sorted({one["--seed"] for one in found}) == [str(seed) for seed in range(200, 208)]


def test_larger_rooms_are_played_for_longer(args):
    given = args("--stages", "smollm2-rooms", "--winner", "full weights")
    jobs = pretrained.jobs_of(given.stages, given.winner)
    assert [(job.arm, job.seed) for job in jobs] == [(arm, seed) for seed in (100, 101) for arm in ("g2po", "grpo")]
    for job in jobs:
        found = options(pretrained.command_of(job, given, workers=1))
        assert (found["--max_turns"], found["--max_steps"], found["--game_size"]) == ("30", "60", "small")


def test_the_main_runs_need_the_pilots_winner(args, capsys):
    with pytest.raises(SystemExit):
        args("--stages", "smollm2")
    assert "--winner is not given" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path):
    """A run that is told of iterations and panels."""

    def make(**given):
        curve = learning.Curve(tmp_path / "findings.jsonl", **{"seconds": 1e6, **given})
        args, state = SimpleNamespace(eval_temperature=1.0), SimpleNamespace(global_step=0)
        control = SimpleNamespace(should_training_stop=False)

        def iteration(success, steps=1):
            for number in range(steps):
                curve.on_step_begin(args, state, control)
                state.global_step += 1
                if number == 0:
                    curve.on_log(args, state, control, {"episode/success_rate": success, "time/rollout": 2.0})
                curve.on_step_end(args, state, control)
            return control.should_training_stop

        def panel(name, success):
            curve.on_log(args, state, control, {f"{name}_success_rate": success, f"{name}_runtime": 3.0})

        def lines():
            return [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]

        return SimpleNamespace(iteration=iteration, panel=panel, lines=lines)

    return make


def test_a_panel_is_recorded_with_its_temperature(run):
    one = run()
    one.panel(at_temperature("eval", 0.4), 0.3)
    one.panel("eval", 0.2)
    one.iteration(0.5)
    one.panel(at_temperature("eval", 0.0), 0.1)
    assert [(line["step"], line.get("temperature"), line.get("panel")) for line in one.lines()] == [
        (0, 0.4, 0.3),
        (0, 1.0, 0.2),
        (1, None, None),
        (1, 0.0, 0.1),
    ]
    assert curves.panel(one.lines(), 0.4) == {0: 0.3} and curves.success(one.lines()) == [0.5]


def test_a_run_that_has_come_far_enough_ends_when_it_is_looked_at(run):
    one = run(reach=0.8, every=4)
    ends = [one.iteration(success, steps=2) for success in (0.9, 0.7, 0.8, 0.2)]
    assert ends == [False, False, False, True], "the third to the first reach it, and every fourth step is looked at"


def test_a_run_ends_while_its_panels_can_be_played(run):
    assert not run(seconds=1e6).iteration(0.5)
    assert run(seconds=1e4, panels_take=1e4).iteration(0.5), "no panel was played, and one takes so long"
    late = run(seconds=1.0)
    late.panel("eval", 0.2)
    assert late.iteration(0.5)
