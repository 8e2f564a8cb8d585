"""Teaching: samples are the prompts of the rollout, an exam changes nothing, teaching ends when it is passed."""

import json
import shutil
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
from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.engines.base import Completion
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.teach.demonstrations import state_rows
from g2po_trl.teach.exam import SuccessEvaluation, TeachingArguments
from g2po_trl.teach.sft import draw_samples, load_base_model, run_teaching, teach

HALLS = [f"hall {seed}" for seed in range(8)]
SHOWN = [Demonstration("go", hall, [], [], 0, letter) for hall in HALLS for letter in "abcd"] + [
    Demonstration("go", "kitchen", [], [(hall, "a")], 1, "b") for hall in HALLS
]


def exam(rows=16, **options):
    options = {"target_success": 1.0, "exam_steps": 2, "history_length": 2, "max_turns": 3} | options
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


def test_exams_change_nothing(tiny_model_dir, tmp_path):
    """Weights are the same however often it was examined: their random numbers are their own."""
    tokenizer, lessons, found = build_tokenizer(), samples_of(SHOWN), []
    for every in (1, 100):
        torch.manual_seed(every)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.1)
        model, results = teach(model, arguments(tmp_path, seed=3), lessons, exam(exam_steps=every), tokenizer)
        found.append((len(results), {name: value.clone() for name, value in model.state_dict().items()}))
    assert [number for number, _ in found] == [5, 1]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def taught(folder, model, rows=16, overwrite=False, **options):
    """Teach `SHOWN` as the recipe does."""
    args, model_args = arguments(folder, **options), ModelConfig(str(model), dtype="float32")
    once, told = exam(rows, num_demonstrations=40), TeachingArguments(overwrite=overwrite)
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
    assert about["exams"][-1]["step"] == 2 and about["exams"][-1]["episodes"] == 16


def test_what_was_interrupted_goes_on(tiny_model_dir, tmp_path, monkeypatch):
    """To the same weights and exams; a new teaching is not begun over a checkpoint, and its exams are its own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = partial(taught, model=tiny_model_dir, rows=1, save_strategy="steps", save_steps=2)
    evaluate = SuccessEvaluation.evaluate

    def interrupted(self, *args):
        if list(parts.glob("exams/exam-*")):
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
    seconds = [[about.pop("seconds"), *(exam.pop("seconds") for exam in about["exams"])] for about in told]
    assert told[0] == told[1] == told[2] and [e["step"] for e in told[0]["exams"]] == [2, 4, 5]
    assert all(last == times[-1] and times == sorted(times) for last, *times in seconds), "those before count too"
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, parts, again)]
    assert all(torch.equal(value, other[name]) for other in weights for name, value in weights[0].items())
    assert not list(parts.glob("checkpoint-*")), "the start is there"
    run(whole, overwrite=True, max_steps=2)
    assert [path.name for path in whole.glob("exams/exam-*")] == ["exam-000002.jsonl"]


def test_what_is_refused(tiny_model_dir, tmp_path):
    def load(model=None, **options):
        args = arguments(tmp_path, **options)
        return load_base_model(TeachingArguments(), args, ModelConfig("none", **(model or {})), str)

    short = arguments(tmp_path, max_length=7)
    for field, call in (
        ("num_exam_tasks", partial(TeachingArguments(num_exam_tasks=1).split, [{}], 0)),
        ("target_success", partial(TeachingArguments, target_success=7.0)),
        ("max_length", partial(teach, str(tiny_model_dir), short, samples_of(SHOWN), None, None)),
        ("packing", partial(load, packing=True)),
        ("push_to_hub", partial(load, push_to_hub=True)),
        ("load_in_4bit", partial(load, {"load_in_4bit": True})),
    ):
        with refused(field):
            call()
