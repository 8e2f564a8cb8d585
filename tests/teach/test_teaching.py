"""Teaching: samples are the rollout's prompts, validations change nothing; `g2po teach` of one's own environment."""

import json
import runpy
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import vision_models
from conftest import build_tokenizer
from datasets import Dataset
from letter_environment import LETTER_PROMPT, DrawnLetterEnvironment, LetterEnvironment, drawing
from refusals import refused
from scripted_actors import ScriptedEngine
from transformers import AutoModelForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl import EnvironmentPool, G2POConfig, PoolLimits, Step, Trajectory, read_jsonl
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.recipe_files import RECIPES
from g2po_trl.engines.base import Completion, Engine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.evaluation.chat_models import load_model
from g2po_trl.prompts.images import load_processing_class, reads_images
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.teach.demonstrations import IMAGES, ExpertActor, build_rows, state_rows
from g2po_trl.teach.sft import draw_samples, load_base_model, run_teaching, teach
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments
from g2po_trl.trajectory import image_file
from g2po_trl.utils.images import as_picture

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


def samples_of(shown, tokenizer=None):
    tokenizer = tokenizer or build_tokenizer()
    rows = state_rows(shown, LETTER_PROMPT, 2, ChatEncoder(tokenizer), {tokenizer.eos_token_id})
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
    end = tokenizer("b<|im_end|>")["input_ids"]
    expected = [{"input_ids": [*ids, *end], "labels": [-100] * len(ids) + end} for ids in read]
    assert len(read) == 2 and [*samples_of(shown, tokenizer)] == expected


def test_validations_change_nothing(tiny_model_dir, tmp_path):
    """Weights are the same however often it was examined: their random numbers are their own."""
    tokenizer, lessons, found = build_tokenizer(), samples_of(SHOWN), []
    for every in (1, 100):
        torch.manual_seed(every)
        model, args = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.1), arguments(tmp_path)
        model, results = teach(model, args, lessons, validation(validation_steps=every), tokenizer)
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
    run(parts, resume_from_checkpoint="auto")
    told = [json.loads((folder / "teaching.json").read_text()) for folder in (whole, parts)]
    for about in told:
        seconds = [about.pop("seconds"), *(validation.pop("seconds") for validation in about["validations"])]
        assert seconds == [seconds[-1], *sorted(seconds[1:])], "those before the interruption count too"
    assert told[0] == told[1] and [e["step"] for e in told[0]["validations"]] == [2, 4, 5]
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, parts))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert not list(parts.glob("checkpoint-*")), "the start is there"
    run(whole, overwrite=True, max_steps=2)
    assert [path.name for path in whole.glob("validations/validation-*")] == ["validation-000002.jsonl"]


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
    "letters_to_teach.py --use_cpu true --save_strategy no --validation_steps 6 --num_validation_episodes 16 "
    "--num_environment_workers 1 --learning_rate 1e-2 --per_device_train_batch_size 8 --warmup_steps 0 --seed 1"
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
    words = resolve(read(words, "g2po teach"), "teach")[1]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *words])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_a_model_is_taught_what_succeeds(game, tiny_model_dir, monkeypatch, capsys):
    g2po_teach(monkeypatch, *SFT, "--model", str(tiny_model_dir), "--num_episodes", "200", "--target_success", "0.9")
    assert capsys.readouterr().out.endswith("Next: g2po train letters_to_teach.py:Game --model runs/game-start\n")
    about = json.loads((game / "runs/game-start/teaching.json").read_text())
    assert about["validations"][-1]["success_rate"] >= 0.9 and about["validations"][-1]["valid_action_ratio"] >= 0.95
    validations = list(read_jsonl(sorted((game / "runs/game-start/validations").glob("*.jsonl"))[-1]))
    rooms = {trajectory.steps[0].observation for trajectory in validations}
    assert len(rooms) == 1, "a fifth of eight training tasks is in validations only"
    with refused("output_dir"):
        g2po_teach(monkeypatch, *SFT, "--model", str(tiny_model_dir))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--expert letters_to_teach.py:misled", "expert"),
        ("--demonstrations none.jsonl", "demonstrations"),
        ("--random_episodes 4", "random_episodes"),
        ("--max_completion_length 1", "max_completion_length"),
    ],
)
def test_what_cannot_be_taught(game, tiny_model_dir, monkeypatch, words, field):
    with refused(field):
        g2po_teach(monkeypatch, *SFT, "--model", str(tiny_model_dir), *words.split())
    assert not (game / "runs/game-start").exists()


def test_prompts_are_as_training_makes_them_by_default():
    arguments = runpy.run_path(str(RECIPE))["ScriptArguments"].__dataclass_fields__
    trained = G2POConfig.__dataclass_fields__
    shared = arguments.keys() & trained.keys() - {"output_dir"}
    assert len(shared) > 8
    for name in shared:
        assert arguments[name].default == trained[name].default, name


# -- with images ------------------------------------------------------------------------------------------------------

TASKS = [{"seed": seed} for seed in range(5)]


def play(processor, history):
    engine = Engine(processor.tokenizer, [processor.tokenizer.eos_token_id])
    engine.reads_text_because = None
    options = {"history": history, "expert": lambda *_: {"content": "b"}}
    actor = ExpertActor(engine, ChatEncoder(processor), LETTER_PROMPT, **options)
    with EnvironmentPool(DrawnLetterEnvironment, PoolLimits(1)) as pool:
        return Player(pool, actor, EpisodeLimits(3)).play(TASKS)[0]


FAST = {("Qwen2.5-VL", "conversation")}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in product(vision_models.FAMILIES, ("window", "conversation"))
]


@pytest.mark.parametrize(("family", "history"), CASES)
def test_the_loss_is_that_of_the_model_alone(family, history, tmp_path, monkeypatch):
    """Of all steps, each as a row of its own with the images of its prompt, without TRL's collator and loss."""
    model, processor = vision_models.build(family)
    trajectories = play(processor, history)
    steps = [step for one in trajectories for step in one.steps]
    rows = build_rows(trajectories)
    assert len(rows) == (5 if history == "conversation" else 10) and len(steps) == 10
    assert {len(row[IMAGES]) for row in rows} == {2 if history == "conversation" else 1}
    alone = SimpleNamespace(processing_class=processor, model=model)
    with torch.no_grad():
        expected = -torch.cat([vision_models.by_hand(alone, step) for step in steps]).mean()
    losses, compute_loss = [], SFTTrainer.compute_loss

    def recorded(*args, **kwargs):
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    monkeypatch.setattr(SFTTrainer, "compute_loss", recorded)
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=len(rows), max_steps=1,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, max_length=None,
        gradient_checkpointing=False,
    )  # fmt: skip
    told = TeachingArguments(
        temperature=1.0, max_completion_length=2, target_success=1.0, validation_steps=9, max_turns=3
    )
    game = DrawnLetterEnvironment
    validation = SuccessEvaluation(game, TASKS[:2], LETTER_PROMPT, told, prompts={"history": history})
    samples = [{name: value for name, value in row.items() if name != "actions"} for row in rows]
    _, results = teach(model, args, Dataset.from_list(samples), validation, processor, shown=trajectories)
    assert len(losses) == 1 and losses[0].item() == pytest.approx(expected.item(), abs=2e-5)
    assert results[-1]["episodes"] == 2 and results[-1]["error_rate"] == 0


DRAWN = """
from g2po_envs.sokoban import SokobanEnvironment, expert

def drawn():
    return SokobanEnvironment(render="image")
"""
WORDS = (
    "drawn_to_teach.py:drawn --num_validation_episodes 3 --num_demonstrations 8 --max_steps 2 --validation_steps 9 "
    "--max_turns 3 --demonstration_turns 9 --max_completion_length 48 --use_cpu true --bf16 false --save_strategy no "
    "--num_environment_workers 1 --learning_rate 1e-3 --per_device_train_batch_size 4 --model start"
).split()


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "drawn_to_teach", raising=False)
    (tmp_path / "drawn_to_teach.py").write_text(DRAWN)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"size": "tiny", "number": {number}}}\n' for number in range(6)))
    for part in vision_models.build("Idefics3"):
        part.save_pretrained(tmp_path / "start")
    return tmp_path


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_sees_is_taught_and_loaded_again(adapter, drawn, monkeypatch, capsys):
    """An adapter is on the language part, as in training."""
    peft = ["--use_peft", "true", "--lora_target_modules", "all-linear"] if adapter else []
    g2po_teach(monkeypatch, *WORDS, *peft)
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 demonstrations succeed" in said
    before, after = (load_model(str(drawn / name)).state_dict() for name in ("start", "runs/model-start"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("text_model" in name for name in moved)
    assert any("vision_model" in name for name in moved) != adapter
    assert reads_images(load_processing_class("runs/model-start"))
    episodes = list(read_jsonl(*drawn.glob("runs/model-start/validations/*.jsonl")))
    files = {
        image_file(drawn / "runs/model-start/validations/x", name) for one in episodes for name in one.steps[0].images
    }
    assert len(files) == 1 and all(file.is_file() for file in files)


def test_a_screenshot_that_replaces_an_earlier_one_begins_a_row():
    """By their token ids, prompts with other images of the same size are the same."""
    first, other = (as_picture(drawing(seed)) for seed in (1, 2))
    steps = [
        Step("a", "b", prompt_ids=[5, 9], completion_ids=[1], prompt_images=[first]),
        Step("a", "b", prompt_ids=[5, 9, 1, 6], completion_ids=[2], prompt_images=[first]),
        Step("a", "b", prompt_ids=[5, 9, 1, 6, 2, 9], completion_ids=[3], prompt_images=[other, first]),
    ]
    rows = build_rows([Trajectory("t", steps, 10.0, "success")])
    assert [(row["input_ids"], row[IMAGES]) for row in rows] == [
        ([5, 9, 1, 6, 2], [str(first)]),
        ([5, 9, 1, 6, 2, 9, 3], [str(other), str(first)]),
    ]
