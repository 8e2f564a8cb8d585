"""Teaching: samples are the prompts of the rollout, an exam changes nothing, teaching ends when it is passed."""

import json
import re
import shutil

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
from g2po_trl import EnvironmentPool, PoolLimits, Step, Trajectory, read_jsonl
from g2po_trl.engines.base import Completion
from g2po_trl.engines.sampling import Sampling
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.prompts.conversation import response_action
from g2po_trl.prompts.template import DEFAULT_PROMPT
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.teach.demonstrations import state_rows
from g2po_trl.teach.exam import SuccessEvaluation, describe_limits
from g2po_trl.teach.experts import as_message
from g2po_trl.teach.sft import TeachingArguments, draw_samples, load_base_model, run_teaching, teach

HALLS = [f"hall {seed}" for seed in range(8)]
SHOWN = [Demonstration("go", hall, [], [], 0, letter) for hall in HALLS for letter in "abcd"] + [
    Demonstration("go", "kitchen", [], [(hall, "a")], 1, "b") for hall in HALLS
]


def exam(**options):
    options = {"target": 1.0, "every": 2, "rows": [{"seed": seed} for seed in range(16)]} | options
    options = {"template": LETTER_PROMPT, "history_length": 2, "max_turns": 3} | options
    return SuccessEvaluation(LetterEnvironment, sampling=Sampling(1.0, max_completion_length=2), **options)


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
    (row,) = samples_of(shown[:1], DEFAULT_PROMPT, tokenizer)
    assert tokenizer.decode(row["input_ids"]).endswith("<think></think><action>b</action><|im_end|>")


ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] != 'assistant' %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_samples_that_teach_something_else(tiny_model_dir, tmp_path):
    tokenizer, samples = build_tokenizer(), samples_of(SHOWN)
    with refused("max_length"):
        teach(str(tiny_model_dir), arguments(tmp_path, max_length=7), samples, exam(), tokenizer)
    tokenizer.chat_template = ENDLESS
    with refused("chat_template"):
        samples_of(SHOWN, tokenizer=tokenizer)


def test_teaching_ends_when_the_exam_is_passed(tiny_model_dir, tmp_path, capsys):
    tokenizer = build_tokenizer()
    lessons = samples_of(SHOWN * 16)
    told = arguments(tmp_path, logging_steps=2, disable_tqdm=False)
    _, results = teach(str(tiny_model_dir), told, lessons, exam(target=0.9, every=6), tokenizer)
    assert results[-1]["success_rate"] >= 0.9 > results[0]["success_rate"]
    exams = [read_jsonl(path) for path in sorted((tmp_path / "exams").glob("*.jsonl"))]
    assert [sum(t.success for t in exam) / 16 for exam in exams] == [result["success_rate"] for result in results]
    assert results[-1]["samples"] == results[-1]["step"] * 8 < len(lessons), "it stopped before the lessons were over"
    out = capsys.readouterr().out
    line = rf"step +{results[-1]['step']} \| {results[-1]['samples']} samples \| loss \d+\.\d\d \| success "
    assert re.search(line, out) and "'loss'" not in out and "train_runtime" not in out


def test_exams_change_nothing(tiny_model_dir, tmp_path):
    """Weights are the same however often it was examined: their random numbers are their own."""
    tokenizer, lessons, found = build_tokenizer(), samples_of(SHOWN), []
    for every in (1, 100):
        torch.manual_seed(every)
        model, results = teach(
            AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.1),
            arguments(tmp_path, seed=3),
            lessons,
            exam(every=every),
            tokenizer,
        )
        found.append((len(results), {name: value.clone() for name, value in model.state_dict().items()}))
    assert [number for number, _ in found] == [5, 1]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_an_adapter_is_merged(tiny_model_dir, tmp_path):
    from peft import LoraConfig

    lessons = samples_of(SHOWN)
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model, _ = teach(
        str(tiny_model_dir), arguments(tmp_path), lessons, exam(every=100), build_tokenizer(), peft_config=adapter
    )
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    after = model.state_dict()
    assert after.keys() == before.keys()
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"q_proj", "v_proj"}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_start_is_saved_as_what_passed_through_it(tiny_model_dir, tmp_path, bf16):
    """vLLM takes the type of its weights from the folder."""
    args, told = arguments(tmp_path / "start", max_steps=2), TeachingArguments(num_demonstrations=16)
    args.bf16 = bf16
    model_args = ModelConfig(str(tiny_model_dir), dtype="float32")
    base_model = load_base_model(told, args, model_args, str)
    samples = draw_samples(told, SHOWN, exam(), base_model, 0)
    run_teaching(args, model_args, base_model, samples, exam())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert {weight.dtype for weight in saved.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
    assert saved.config.dtype == saved.dtype
    about = json.loads((tmp_path / "start/teaching.json").read_text())
    assert about["exams"][-1]["step"] == 2 and about["exams"][-1]["episodes"] == 16


class Interrupted(Exception):
    pass


def test_what_was_interrupted_goes_on(tiny_model_dir, tmp_path, monkeypatch):
    """To the same weights and exams; a new teaching is not begun over a checkpoint, and its exams are its own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told, model_args = TeachingArguments(num_demonstrations=40), ModelConfig(str(tiny_model_dir), dtype="float32")

    def run(folder, **options):
        args = arguments(folder, **({"save_strategy": "steps", "save_steps": 2} | options))
        once = exam(rows=[{"seed": 0}])
        base_model = load_base_model(told, args, model_args, str)
        run_teaching(args, model_args, base_model, draw_samples(told, SHOWN, once, base_model, 0), once)

    evaluate = SuccessEvaluation.evaluate

    def interrupted(self, *args):
        if list(parts.glob("exams/exam-*")):
            raise Interrupted
        return evaluate(self, *args)

    run(whole)
    monkeypatch.setattr(SuccessEvaluation, "evaluate", interrupted)
    with pytest.raises(Interrupted):
        run(parts)
    monkeypatch.setattr(SuccessEvaluation, "evaluate", evaluate)
    assert not (parts / "teaching.json").exists()
    with refused("output_dir"):
        run(parts)
    shutil.copytree(parts, again := tmp_path / "again")
    run(parts, resume_from_checkpoint="auto")
    told.overwrite = True
    run(again)
    told_by = [json.loads((folder / "teaching.json").read_text()) for folder in (whole, parts, again)]
    seconds = [[about.pop("seconds"), *(exam.pop("seconds") for exam in about["exams"])] for about in told_by]
    assert told_by[0] == told_by[1] == told_by[2] and [e["step"] for e in told_by[0]["exams"]] == [2, 4, 5]
    assert all(last == times[-1] and times == sorted(times) for last, *times in seconds), "those before count too"
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, parts, again)]
    assert all(torch.equal(value, other[name]) for other in weights for name, value in weights[0].items())
    assert not list(parts.glob("checkpoint-*")), "the start is there"
    run(whole, max_steps=2)
    assert [path.name for path in whole.glob("exams/exam-*")] == ["exam-000002.jsonl"]


def test_samples_are_counted_by_steps_where_these_end_it(tiny_model_dir, tmp_path):
    lessons = samples_of(SHOWN[:8])
    once = exam(every=100, rows=[{"seed": 0}])
    _, results = teach(str(tiny_model_dir), arguments(tmp_path, max_steps=3), lessons, once, build_tokenizer())
    assert results[-1]["samples"] == 24


def test_tasks_of_the_exam_are_not_shown():
    rows = [{"seed": seed} for seed in range(20)]
    to_show, to_examine = TeachingArguments(num_exam_tasks=5).split(rows, 0)
    assert len(to_examine) == 5 and sorted(r["seed"] for r in to_show + to_examine) == list(range(20))
    assert TeachingArguments(num_exam_tasks=5).split(rows, 0)[1] == to_examine
    with refused("num_exam_tasks"):
        TeachingArguments(num_exam_tasks=20).split(rows, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -1), ("history_length", -1), ("max_completion_length", 0), ("num_demonstrations", 0)),
        *(("exam_steps", 0), ("target_success", 0.0), ("target_success", 7.0)),
    ],
)
def test_arguments_of_teaching(name, value):
    with refused(name):
        TeachingArguments(**{name: value})


@pytest.mark.parametrize("option", ["load_in_4bit", "packing", "push_to_hub"])
def test_options_without_a_meaning_are_refused_before_games_are_made(tmp_path, option):
    args, model_args = arguments(tmp_path), ModelConfig("nothing")
    setattr(model_args if hasattr(model_args, option) else args, option, True)
    with refused(option):
        load_base_model(TeachingArguments(), args, model_args, str)


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ({"valid_action_ratio": 0.4}, "The format is the limit: 40% "),
        ({"tool_call_ratio": 0.05}, "Tool calls are the limit: 5% of the completions call a tool, and 20% "),
        ({"tool_call_ratio": 0.15}, "The format is not the limit: 100% "),
    ],
)
def test_what_limits_a_model(ratios, limit):
    """The expert itself calls a tool in one step of five, and half as often is enough."""
    call = response_action(as_message({"name": "go", "arguments": {}}))
    steps = [Step("hall", call, messages=[]), *(Step("hall", "a", messages=[]) for _ in range(4))]
    last = {"valid_action_ratio": 1.0, "success_rate": 0.0, **ratios}
    limit_said = describe_limits(exam(target_valid=0.9), last, [Trajectory("t", steps, 10.0, "success")], "none")
    assert limit_said.startswith(limit)
