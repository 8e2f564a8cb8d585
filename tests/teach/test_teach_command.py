"""`g2po teach` of an environment or an agent of one's own: what it takes from the training, and what it refuses."""

import json
import runpy
import sys

import pytest
from refusals import refused

from g2po_trl import G2POConfig, read_jsonl
from g2po_trl.cli.commands.init import write_folder
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.commands.view import main as view_main
from g2po_trl.cli.recipe_files import RECIPES

RECIPE = RECIPES / "teach_environment.py"
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
    words = resolve(read(["letters_to_teach.py", *words], "g2po teach"))[1]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *words])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_a_model_is_taught_what_succeeds(game, tiny_model_dir, monkeypatch, capsys):
    teach(monkeypatch, "--model", str(tiny_model_dir), "--num_episodes", "200", "--target_success", "0.9", *SFT)
    assert capsys.readouterr().out.endswith("Next: g2po train letters_to_teach.py:Game --model runs/game-start\n")
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert about["exams"][-1]["success_rate"] >= 0.9 and about["exams"][-1]["valid_action_ratio"] >= 0.95
    exams = list(read_jsonl(sorted((game / "runs/game-start/exams").glob("*.jsonl"))[-1]))
    rooms = {trajectory.steps[0].observation for trajectory in exams}
    assert len(rooms) == 1, "a fifth of eight training tasks is in exams only"
    with refused("output_dir"):
        teach(monkeypatch, "--model", str(tiny_model_dir), *SFT)


def test_too_little_teaching_says_what_more_is(game, tiny_model_dir, monkeypatch, capsys):
    teach(monkeypatch, "--model", str(tiny_model_dir), "--num_demonstrations", "8", *SFT)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120, said
    *_, exams, more, start = said.splitlines()
    assert "g2po view runs/game-start" in exams and "more --num-episodes" in more
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert "g2po train letters" in start and not about["reached"]
    view_main(["runs/game-start", "--text"])
    assert "Evaluation exam, step 1: 0.0 % of 16 episodes solved" in capsys.readouterr().out


REFUSED = {
    "--expert letters_to_teach.py:misled": "expert",
    "--demonstration_turns 1": "expert",
    "--num_exam_tasks 8": "num_exam_tasks",
    "--prompt letters_to_teach.py:expert": "prompt",
    "--demonstrations none.jsonl": "demonstrations",
    "--demonstrations recorded.jsonl": "demonstrations",
    "--random_episodes 4": "random_episodes",
    "--max_completion_length 1": "max_completion_length",
}


@pytest.mark.parametrize(("words", "field"), REFUSED.items())
def test_what_cannot_be_taught(game, tiny_model_dir, monkeypatch, words, field):
    record = {"task_id": "other", "steps": [], "reward": 10.0, "outcome": "success"}
    (game / "recorded.jsonl").write_text(json.dumps(record) + "\n")
    with refused(field):
        teach(monkeypatch, "--model", str(tiny_model_dir), *words.split(), *SFT)
    assert not (game / "runs/game-start").exists()


def test_values_that_teaching_refuses(game, monkeypatch, capsys):
    for words in (
        *("--num_exam_tasks -1", "--target_success 1.5", "--history all", "--train_config none.yaml"),
        *("--demonstrations a --random_episodes 1", "--environment_step_timeout -1"),
    ):
        with pytest.raises(SystemExit):
            teach(monkeypatch, *words.split(), *SFT)
        assert words.split()[0].removeprefix("--environment_").removeprefix("--") in capsys.readouterr().err


def test_files_beside_are_taken_from_the_training(tmp_path, monkeypatch):
    write_folder(tmp_path / "tidy")
    monkeypatch.chdir(tmp_path / "tidy")
    given = {"environment": f"{tmp_path}/tidy/environment.py:TidyEnvironment"}
    words = ["--environment", given["environment"], "--seed", "1"]
    assert resolve(read(["--seed", "1"], "g2po teach")) == (RECIPE, words)
    recipe = runpy.run_path(str(RECIPE))
    assert recipe["DEFAULT_CONFIG"](given)["learning_rate"] == 1e-3, "of teach.yaml"
    found = recipe["training_defaults"](given)
    assert found["output_dir"] == "runs/tidy-start"
    assert recipe["OwnArguments"](**given).tasks == f"{tmp_path}/tidy/tasks.jsonl"
    assert (found["max_turns"], found["model_name_or_path"]) == (7, "model")
    (tmp_path / "mine.yaml").write_text("tasks: others.jsonl\n")
    found = recipe["training_defaults"]({**given, "train_config": str(tmp_path / "mine.yaml")})
    assert found["tasks"] == "others.jsonl" and "max_turns" not in found


def test_prompts_are_as_training_makes_them_by_default():
    arguments = runpy.run_path(str(RECIPE))["ScriptArguments"].__dataclass_fields__
    trained = G2POConfig.__dataclass_fields__
    shared = arguments.keys() & trained.keys() - {"output_dir"}
    assert len(shared) > 8
    for name in shared:
        assert arguments[name].default == trained[name].default, name
