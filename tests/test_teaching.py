"""A cold start: lessons are the prompts of the rollout, an exam changes nothing, teaching ends when it is passed."""

import json

import pytest
import torch
from conftest import build_tokenizer
from letter_environment import LETTER_PROMPT, LetterEnvironment
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer

from g2po_envs.teaching import Exam, TeachingArguments, as_dataset, run_teaching, teach
from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl import read_jsonl
from g2po_trl.rollout.encoding import ChatEncoder
from g2po_trl.rollout.sampling import Sampling

HALLS = [f"hall {seed}" for seed in range(8)]
SHOWN = [Demonstration("go", hall, [], [], 0, letter) for hall in HALLS for letter in "abcd"] + [
    Demonstration("go", "kitchen", [], [(hall, "a")], 1, "b") for hall in HALLS
]


def exam(**options):
    options = {"target": 1.0, "every": 2, "rows": [{"seed": seed} for seed in range(16)]} | options
    settings = {"history_length": 2, "max_turns": 3, "sampling": Sampling(1.0, max_tokens=2)}
    return Exam(LetterEnvironment, template=LETTER_PROMPT, **settings, **options)


def arguments(folder, **options):
    shared = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    learning = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "num_train_epochs": 1}
    return SFTConfig(str(folder), gradient_checkpointing=False, **shared, **learning, **options)


@pytest.fixture
def reply_is_a_letter(monkeypatch):
    monkeypatch.setattr("g2po_envs.teaching.REPLY", "{action}")


def test_lessons_are_the_prompts_of_the_rollout(tiny_model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    lessons = as_dataset(SHOWN, LETTER_PROMPT, 2)
    trainer = SFTTrainer(str(tiny_model_dir), arguments(tmp_path), train_dataset=lessons, processing_class=tokenizer)
    encode = ChatEncoder(tokenizer, None)
    for lesson, row in zip(lessons, trainer.train_dataset, strict=True):
        ids, _ = encode(lesson["prompt"])
        labels = row["labels"] if "labels" in row else None
        assert row["input_ids"][: len(ids)] == ids, "what is read in training is what is read in play"
        reply = tokenizer.decode(row["input_ids"][len(ids) :])
        assert reply.startswith(f"{lesson['completion'][0]['content']}<|im_end|>")
        assert labels is None or set(labels[: len(ids)]) == {-100}


def test_teaching_ends_when_the_exam_is_passed(tiny_model_dir, tmp_path, reply_is_a_letter, capsys):
    tokenizer = build_tokenizer()
    lessons = as_dataset(SHOWN * 16, LETTER_PROMPT, 2)
    _, results = teach(str(tiny_model_dir), arguments(tmp_path), lessons, exam(target=0.9, every=6), tokenizer)
    assert results[-1]["success_rate"] >= 0.9 > results[0]["success_rate"]
    exams = [read_jsonl(path) for path in sorted((tmp_path / "exams").glob("*.jsonl"))]
    assert [sum(t.success for t in exam) / 16 for exam in exams] == [result["success_rate"] for result in results]
    assert results[-1]["samples"] == results[-1]["step"] * 8 < len(lessons), "it stopped before the lessons were over"
    assert f"step {results[-1]['step']:>4} | {results[-1]['samples']} samples | success" in capsys.readouterr().out


def test_exams_change_nothing(tiny_model_dir, tmp_path, reply_is_a_letter):
    """Weights are the same however often it was examined: their random numbers are their own."""
    tokenizer, lessons, found = build_tokenizer(), as_dataset(SHOWN, LETTER_PROMPT, 2), []
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


def test_an_adapter_is_merged(tiny_model_dir, tmp_path, reply_is_a_letter):
    from peft import LoraConfig

    lessons = as_dataset(SHOWN, LETTER_PROMPT, 2)
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
def test_a_start_is_saved_as_what_passed_through_it(tiny_model_dir, tmp_path, reply_is_a_letter, bf16):
    """vLLM takes the type of its weights from the folder."""
    args, told = arguments(tmp_path / "start", max_steps=2), TeachingArguments(num_demonstrations=16)
    args.bf16 = bf16
    run_teaching(told, args, ModelConfig(str(tiny_model_dir), dtype="float32"), SHOWN, exam())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert {weight.dtype for weight in saved.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
    assert saved.config.dtype == saved.dtype
    about = json.loads((tmp_path / "start/teaching.json").read_text())
    assert about["exams"][-1]["step"] == 2 and about["exams"][-1]["episodes"] == 16


def test_tasks_of_the_exam_are_not_shown():
    rows = [{"seed": seed} for seed in range(20)]
    to_show, to_examine = TeachingArguments(num_exam_tasks=5).split(rows, 0)
    assert len(to_examine) == 5 and sorted(r["seed"] for r in to_show + to_examine) == list(range(20))
    assert TeachingArguments(num_exam_tasks=5).split(rows, 0)[1] == to_examine
    with pytest.raises(ValueError, match="num_exam_tasks is 20: set it above 0 and below the 20 training tasks"):
        TeachingArguments(num_exam_tasks=20).split(rows, 0)


@pytest.mark.parametrize(
    ("options", "message"), [({"target": 0}, "target_success is 0"), ({"every": 0}, "exam_steps")]
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        exam(**options)
