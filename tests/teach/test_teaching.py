"""Teaching: samples are the rollout's prompts, validations change nothing; `g2po teach` of one's own environment."""

import json
import runpy
import shutil
import sys
from functools import partial

import pytest
import torch
from conftest import build_tokenizer
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment
from refusals import refused
from scripted_actors import ScriptedEngine
from transformers import AutoModelForCausalLM
from trl import ModelConfig, SFTConfig

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl import EnvironmentPool, G2POConfig, PoolLimits, read_jsonl
from g2po_trl.cli.commands.init import write_folder
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.commands.view import main as view_main
from g2po_trl.cli.recipe_files import RECIPES
from g2po_trl.engines.base import Completion
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.teach.demonstrations import state_rows
from g2po_trl.teach.sft import draw_samples, load_base_model, run_teaching, teach
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments

HALLS = [f"hall {seed}" for seed in range(8)]
SHOWN = [Demonstration("go", hall, [], [], 0, letter) for hall in HALLS for letter in "abcd"] + [
    Demonstration("go", "kitchen", [], [(hall, "a")], 1, "b") for hall in HALLS
]


def validation(rows=16, **options):
    options = {"target_success": 1.0, "validation_steps": 2, "history_length": 2, "max_turns": 3} | options
    told = TeachingArguments(temperature=1.0, max_completion_length=2, **options)
    return SuccessEvaluation(LetterEnvironment, [{"seed": seed} for seed in range(rows)], LETTER_PROMPT, told)


def arguments(folder, **options):
    shared = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    learning = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "num_train_epochs": 1}
    return SFTConfig(str(folder), gradient_checkpointing=False, **(shared | learning | options))


def samples_of(shown, template=LETTER_PROMPT, tokenizer=None):
    tokenizer = tokenizer or build_tokenizer()
    rows = state_rows(shown, template, 2, ChatEncoder(tokenizer), {tokenizer.eos_token_id})
    return Dataset.from_list(list(rows))


def test_samples_are_the_prompts_of_the_rollout():
    """Of an episode that is played, with its history, and the completions that the agent gave in it."""
    tokenizer, read = build_tokenizer(), []

    def answer(prompts):
        read.extend(prompts)
        return [Completion(tokenizer("b")["input_ids"]) for _ in prompts]

    actor = PromptActor(ScriptedEngine(tokenizer, answer), ChatEncoder(tokenizer), LETTER_PROMPT, history_length=2)
    with EnvironmentPool(LetterEnvironment, PoolLimits(1)) as pool:
        Player(pool, actor, EpisodeLimits(3)).play([{"seed": 1}])
    walk = [("hall 1", []), ("kitchen", [("hall 1", "b")])]
    shown = [Demonstration("go", room, None, history, len(history), "b") for room, history in walk]
    rows = samples_of(shown, LETTER_PROMPT, tokenizer)
    assert len(read) == len(rows) == 2
    for ids, row in zip(read, rows):
        assert row["input_ids"][: len(ids)] == list(ids), "what is read in training is what is read in play"
        assert row["labels"] == [-100] * len(ids) + row["input_ids"][len(ids) :]
        assert tokenizer.decode(row["labels"][len(ids) :]) == "b<|im_end|>"


def test_validations_change_nothing(tiny_model_dir, tmp_path):
    """Weights are the same however often it was examined: their random numbers are their own."""
    tokenizer, lessons, found = build_tokenizer(), samples_of(SHOWN), []
    for every in (1, 100):
        torch.manual_seed(every)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.1)
        model, results = teach(
            model, arguments(tmp_path, seed=3), lessons, validation(validation_steps=every), tokenizer
        )
        found.append((len(results), {name: value.clone() for name, value in model.state_dict().items()}))
    assert [number for number, _ in found] == [5, 1]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def taught(folder, model, rows=16, overwrite=False, **options):
    """Teach `SHOWN` as the recipe does."""
    args, model_args = arguments(folder, **options), ModelConfig(str(model), dtype="float32")
    once, told = validation(rows, num_demonstrations=40), TeachingArguments(overwrite=overwrite)
    base_model = load_base_model(told, args, model_args, str)
    run_teaching(args, model_args, base_model, draw_samples(SHOWN, once, base_model, 0), once)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_start_is_saved_as_what_passed_through_it(tiny_model_dir, tmp_path, bf16):
    """vLLM takes the type of its weights from the folder."""
    taught(tmp_path / "start", tiny_model_dir, max_steps=2, bf16=bf16)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert {weight.dtype for weight in saved.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
    assert saved.config.dtype == saved.dtype
    about = json.loads((tmp_path / "start/teaching.json").read_text())
    assert about["validations"][-1]["step"] == 2 and about["validations"][-1]["episodes"] == 16


def test_what_was_interrupted_goes_on(tiny_model_dir, tmp_path, monkeypatch):
    """To the same weights and validations; a new teaching begins with neither checkpoints nor validations."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = partial(taught, model=tiny_model_dir, rows=1, save_strategy="steps", save_steps=2)
    evaluate = SuccessEvaluation.evaluate

    def interrupted(self, *args):
        if list(parts.glob("validations/validation-*")):
            raise KeyboardInterrupt
        return evaluate(self, *args)

    run(whole)
    monkeypatch.setattr(SuccessEvaluation, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(parts)
    monkeypatch.setattr(SuccessEvaluation, "evaluate", evaluate)
    assert not (parts / "teaching.json").exists()
    with refused("output_dir"):
        run(parts)
    shutil.copytree(parts, again := tmp_path / "again")
    run(parts, resume_from_checkpoint="auto")
    run(again, overwrite=True)
    told = [json.loads((folder / "teaching.json").read_text()) for folder in (whole, parts, again)]
    seconds = [
        [about.pop("seconds"), *(validation.pop("seconds") for validation in about["validations"])] for about in told
    ]
    assert told[0] == told[1] == told[2] and [e["step"] for e in told[0]["validations"]] == [2, 4, 5]
    assert all(last == times[-1] and times == sorted(times) for last, *times in seconds), "those before count too"
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, parts, again)]
    assert all(torch.equal(value, other[name]) for other in weights for name, value in weights[0].items())
    assert not list(parts.glob("checkpoint-*")), "the start is there"
    run(whole, overwrite=True, max_steps=2)
    assert [path.name for path in whole.glob("validations/validation-*")] == ["validation-000002.jsonl"]


def test_what_is_refused(tiny_model_dir, tmp_path):
    def load(model=None, **options):
        args = arguments(tmp_path, **options)
        return load_base_model(TeachingArguments(), args, ModelConfig("none", **(model or {})), str)

    short = arguments(tmp_path, max_length=7)
    for field, call in (
        ("num_validation_tasks", partial(TeachingArguments(num_validation_tasks=1).split, [{}], 0)),
        ("target_success", partial(TeachingArguments, target_success=7.0)),
        ("max_length", partial(teach, str(tiny_model_dir), short, samples_of(SHOWN), None, None)),
        ("packing", partial(load, packing=True)),
        ("push_to_hub", partial(load, push_to_hub=True)),
        ("load_in_4bit", partial(load, {"load_in_4bit": True})),
    ):
        with refused(field):
            call()


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
    "--use_cpu true --save_strategy no --validation_steps 6 --num_validation_episodes 16 --num_environment_workers 1 "
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


def g2po_teach(monkeypatch, *words):
    words = resolve(read(["letters_to_teach.py", *words], "g2po teach"))[1]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *words])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_a_model_is_taught_what_succeeds(game, tiny_model_dir, monkeypatch, capsys):
    g2po_teach(monkeypatch, "--model", str(tiny_model_dir), "--num_episodes", "200", "--target_success", "0.9", *SFT)
    assert capsys.readouterr().out.endswith("Next: g2po train letters_to_teach.py:Game --model runs/game-start\n")
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert about["validations"][-1]["success_rate"] >= 0.9 and about["validations"][-1]["valid_action_ratio"] >= 0.95
    validations = list(read_jsonl(sorted((game / "runs/game-start/validations").glob("*.jsonl"))[-1]))
    rooms = {trajectory.steps[0].observation for trajectory in validations}
    assert len(rooms) == 1, "a fifth of eight training tasks is in validations only"
    with refused("output_dir"):
        g2po_teach(monkeypatch, "--model", str(tiny_model_dir), *SFT)


def test_too_little_teaching_says_what_more_is(game, tiny_model_dir, monkeypatch, capsys):
    g2po_teach(monkeypatch, "--model", str(tiny_model_dir), "--num_demonstrations", "8", *SFT)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120, said
    *_, validations, more, start = said.splitlines()
    assert "g2po view runs/game-start" in validations and "more --num-episodes" in more
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert "g2po train letters" in start and not about["reached"]
    folder = game / "runs/game-start/validations"
    for old in (False, True):  # under the names of release candidates, too
        if old:
            (folder / "validation-000001.jsonl").rename(folder / "exam-000001.jsonl")
            folder.rename(folder.with_name("exams"))
        view_main(["runs/game-start", "--text"])
        assert "Evaluation validation, step 1: 0.0 % of 16 episodes solved" in capsys.readouterr().out


REFUSED = {
    "--expert letters_to_teach.py:misled": "expert",
    "--demonstration_turns 1": "expert",
    "--num_validation_tasks 8": "num_validation_tasks",
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
        g2po_teach(monkeypatch, "--model", str(tiny_model_dir), *words.split(), *SFT)
    assert not (game / "runs/game-start").exists()


def test_values_that_teaching_refuses(game, monkeypatch, capsys):
    for words in (
        *("--num_validation_tasks -1", "--target_success 1.5", "--history all", "--train_config none.yaml"),
        *("--demonstrations a --random_episodes 1", "--environment_step_timeout -1"),
    ):
        with pytest.raises(SystemExit):
            g2po_teach(monkeypatch, *words.split(), *SFT)
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
