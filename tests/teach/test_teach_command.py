"""`g2po teach` of an environment or an agent of one's own: what it takes from the training, and what it refuses."""

import json
import runpy
import sys

import pytest
from refusals import refused

from g2po_trl import PoolLimits, read_jsonl
from g2po_trl.cli.commands.init import write_folder
from g2po_trl.cli.commands.teach import resolve
from g2po_trl.cli.commands.train import read
from g2po_trl.cli.commands.view import main as view_main
from g2po_trl.cli.recipe_files import recipes_folder

RECIPE = recipes_folder() / "teach_environment.py"
GAME = '''
from g2po_trl import TextEnvironment
from letter_environment import LETTER_PROMPT, LetterEnvironment

class Game(LetterEnvironment, TextEnvironment):
    prompt_template = LETTER_PROMPT

def expert(game, rng):
    """Right in the first room only in three episodes of four."""
    return "z" if rng.random() < 0.25 and len(game.rooms) == 1 else "b"

def misled(game):
    return "z"
'''
SFT = (
    "--use_cpu true --save_strategy no --exam_steps 6 --num_exam_episodes 16 --num_environment_workers 1 "
    "--learning_rate 1e-2 --per_device_train_batch_size 8 --warmup_steps 0 --seed 1"
).split()


@pytest.fixture
def game(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters_to_teach.py").write_text(GAME)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"seed": {seed}}}\n' for seed in range(10)))
    (tmp_path / "config.yaml").write_text(
        "output_dir: runs/game\nnum_eval_tasks: 2\nmax_turns: 3\nmax_completion_length: 2\nlearning_rate: 1.0e-6\n"
    )
    monkeypatch.delitem(sys.modules, "letters_to_teach", raising=False)
    return tmp_path


def teach(monkeypatch, *words):
    words = resolve(read(["letters_to_teach.py", *words]))[1]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *words])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_a_model_is_taught_what_succeeds(game, tiny_model_dir, monkeypatch, capsys):
    teach(monkeypatch, "--model", str(tiny_model_dir), "--num_episodes", "200", "--target_success", "0.9", *SFT)
    out = capsys.readouterr().out
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert about["exams"][-1]["success_rate"] >= 0.9 and about["exams"][-1]["valid_action_ratio"] >= 0.95
    assert "of 200 expert episodes succeed; not taught: " in out and "x ended without success" in out
    assert out.endswith(
        "With beta above 0, the KL term's reference is this model: TRL loads it from the same folder.\n"
        "Next: g2po train letters_to_teach.py:Game --model runs/game-start\n"
    )
    exams = list(read_jsonl(sorted((game / "runs/game-start/exams").glob("*.jsonl"))[-1]))
    rooms = {trajectory.steps[0].observation for trajectory in exams}
    assert len(rooms) == 1, "a fifth of eight training tasks is in exams only"
    with refused("output_dir"):
        teach(monkeypatch, "--model", str(tiny_model_dir), *SFT)


def test_too_little_teaching_says_what_more_is(game, tiny_model_dir, monkeypatch, capsys):
    teach(monkeypatch, "--model", str(tiny_model_dir), "--num_demonstrations", "8", *SFT)
    said = capsys.readouterr().out
    assert "target of 30% not reached" in said and max(map(len, said.splitlines())) <= 120, said
    assert "\nThe format is the limit: " in said or "\nThe format is not the limit: " in said
    *_, exams, more, start = said.splitlines()
    assert exams == "Next: g2po view runs/game-start, its exams"
    assert more.startswith("Or the same command with --num-episodes 70 --num-demonstrations 80: at most about ")
    assert start.startswith("Or, if the model sometimes succeeds: g2po train letters")
    view_main(["runs/game-start", "--text"])
    assert "Evaluation exam, step 1: 0.0 % of 16 episodes solved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--expert letters_to_teach.py:misled", "expert"),
        ("--demonstration_turns 1", "expert"),
        ("--num_exam_tasks 8", "num_exam_tasks"),
        ("--prompt letters_to_teach.py:expert", "prompt"),
        ("--demonstrations none.jsonl", "demonstrations"),
        ("--demonstrations recorded.jsonl", "demonstrations"),
        ("--random_episodes 4", "random_episodes"),
        ("--max_completion_length 1", "max_completion_length"),
    ],
)
def test_what_cannot_be_taught(game, tiny_model_dir, monkeypatch, words, field):
    record = {"task_id": "other", "steps": [], "reward": 10.0, "outcome": "success"}
    (game / "recorded.jsonl").write_text(json.dumps(record) + "\n")
    with refused(field):
        teach(monkeypatch, "--model", str(tiny_model_dir), *words.split(), *SFT)
    assert not (game / "runs/game-start").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--num_exam_tasks -1", "num_exam_tasks"),
        ("--num_episodes 0", "num_episodes"),
        ("--target_valid 1.5", "target_valid"),
        ("--history all", "history"),
        ("--train_config none.yaml", "train_config"),
        ("--demonstrations a --random_episodes 1", "demonstrations and random_episodes"),
        ("--environment_step_timeout -1", "step_timeout"),
    ],
)
def test_values_that_teaching_refuses(game, monkeypatch, words, name, capsys):
    with pytest.raises(SystemExit):
        teach(monkeypatch, *words.split(), *SFT)
    assert name in capsys.readouterr().err


def test_without_any_source_the_message_names_three(game, tiny_model_dir, monkeypatch):
    (game / "letters_to_teach.py").write_text(GAME.partition("def expert")[0])
    with refused("expert") as stopped:
        teach(monkeypatch, "--model", str(tiny_model_dir), *SFT)
    for remedy in ("expert(environment)", "--demonstrations FILE", "--random-episodes N"):
        assert remedy in str(stopped.value)


def test_exams_have_the_workers_and_turns_of_the_training(game, tiny_model_dir, monkeypatch, capsys):
    """An expert that needs a turn more than the game has is taught with `demonstration_turns`."""
    pools = []
    monkeypatch.setattr("g2po_trl.teach.sft.EnvironmentPool", lambda _, limits: pools.append(limits))
    with open("config.yaml", "a") as file:
        file.write("environment_step_timeout: 7\nenvironment_worker_resets: 5\n")
    (game / "config.yaml").write_text((game / "config.yaml").read_text().replace("max_turns: 3", "max_turns: 1"))
    with pytest.raises(TypeError):  # the pool of exams is None here
        teach(monkeypatch, "--model", str(tiny_model_dir), "--demonstration_turns", "3", *SFT)
    assert "expert episodes succeed" in capsys.readouterr().out
    assert pools == [PoolLimits(1, environment_step_timeout=7.0, environment_worker_resets=5)]


def test_files_beside_are_taken_from_the_training(tmp_path, monkeypatch):
    write_folder(tmp_path / "tidy")
    monkeypatch.chdir(tmp_path / "tidy")
    assert resolve(read(["--seed", "1"])) == (
        RECIPE,
        ["--environment", f"{tmp_path}/tidy/environment.py:TidyEnvironment", "--seed", "1"],
    )
    recipe = runpy.run_path(str(RECIPE))
    given = {"environment": f"{tmp_path}/tidy/environment.py:TidyEnvironment"}
    assert recipe["DEFAULT_CONFIG"](given)["learning_rate"] == 1e-3, "of teach.yaml"
    for folder in (tmp_path / "tidy", tmp_path):
        monkeypatch.chdir(folder)
        found, there = recipe["training_defaults"](given), "" if folder.name == "tidy" else "tidy/"
        assert (found["tasks"], found["output_dir"]) == (f"{there}tasks.jsonl", f"{there}runs/tidy-start")
        assert (found["max_turns"], found["model_name_or_path"]) == (7, f"{there}model")
    (tmp_path / "mine.yaml").write_text("tasks: others.jsonl\n")
    found = recipe["training_defaults"]({**given, "train_config": str(tmp_path / "mine.yaml")})
    assert found["tasks"] == "others.jsonl" and "max_turns" not in found


def test_an_agent_beside(tmp_path, monkeypatch):
    write_folder(tmp_path / "tidy", kind="agent")
    monkeypatch.chdir(tmp_path / "tidy")
    expected = ["--agent", f"{tmp_path}/tidy/agent.py:tidy"]
    assert resolve(read([]))[1] == resolve(read(["--agent", "agent.py"]))[1] == expected


def test_prompts_are_as_training_makes_them_by_default():
    from g2po_trl import G2POConfig

    arguments = runpy.run_path(str(RECIPE))["ScriptArguments"].__dataclass_fields__
    shared = arguments.keys() & G2POConfig.__dataclass_fields__.keys() - {"output_dir"}
    assert len(shared) > 8
    for name in shared:
        assert arguments[name].default == G2POConfig.__dataclass_fields__[name].default, name
