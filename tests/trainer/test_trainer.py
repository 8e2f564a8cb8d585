"""The real trainer on a tiny random model: exactness of the gradient, learning, and bad input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from letter_environment import LetterEnvironment, LongLetterEnvironment, SuicidalEnvironment
from letter_trainer import TASKS, flat_gradient, flat_weights, make_config, move_weights, play_batch, played_in
from refusals import refused
from transformers import AutoTokenizer
from trl import GRPOConfig

from g2po_trl import G2POError, G2POTrainer, StepResult
from g2po_trl.runs.summary import before_and_after
from g2po_trl.update.batch import StepBatch, loss_scale
from g2po_trl.utils.json import read_json_lines

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def micro_batches_of(trainer, batch, max_tokens=10**9, extra_rows=0):
    """What `_micro_batches` makes; with `extra_rows`, the same with filler rows added to every micro-batch."""
    trainer.update.config.max_tokens = max_tokens
    ((part,), _) = trainer.update.make_mini_batches(trainer.model, batch)
    if extra_rows:
        rows, tokens, args = range(len(batch)), batch.num_trained_tokens(), trainer.args
        one = trainer.update.micro_batch(batch)
        one |= batch.collate(rows, len(rows) + extra_rows, trainer.processing_class.pad_token_id)
        one["num_items_in_batch"] = torch.tensor(tokens)
        one["loss_scale"] = loss_scale(args.loss_type, one, len(batch), tokens, 1, args.steps_per_generation)
        part = [one]
    trainer._add_log_probs([part])
    return part


def test_gradient_of_any_micro_batches_is_that_of_the_whole_batch(make_trainer):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, beta=0.1)
    batch = play_batch(trainer)
    move_weights(trainer.model)
    for loss_type in LOSSES:
        trainer.loss_type = trainer.args.loss_type = trainer.update.config.loss_type = loss_type
        whole = flat_gradient(trainer, micro_batches_of(trainer, batch))
        cut = micro_batches_of(trainer, batch, max_tokens=150)
        assert len(cut) > 3 and whole.abs().max() > 0
        for other in (cut, micro_batches_of(trainer, batch, extra_rows=7)):
            assert (flat_gradient(trainer, other) - whole).norm() / whole.norm() < 1e-5, loss_type


def test_gradient_of_dapo_is_that_of_the_equation(make_trainer):
    """dapo without KL, first update: the gradient of -sum(A * logp) / tokens, computed with plain transformers."""
    trainer = make_trainer(LongLetterEnvironment, beta=0.0)
    trajectories, _ = trainer.play([dict(TASKS[i // 4]) for i in range(8)])
    steps = [step for t in trajectories for step in t.steps]
    advantages = np.linspace(-1, 1, len(steps))
    batch = StepBatch.from_trajectories(trajectories, advantages)
    ours = flat_gradient(trainer, micro_batches_of(trainer, batch, max_tokens=200))

    trainer.model.zero_grad()
    tokens = sum(len(step.completion_ids) for step in steps)
    for step, advantage in zip(steps, advantages):
        ids = torch.tensor([step.prompt_ids + step.completion_ids])
        logits = trainer.model(input_ids=ids).logits[0, len(step.prompt_ids) - 1 : -1]
        logps = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(step.completion_ids)[:, None])
        (-advantage * logps.sum() / tokens).backward()
    plain = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert (ours - plain).norm() / plain.norm() < 1e-5


def test_train_with_zero_advantages_and_no_kl_keeps_weights(make_trainer):
    trainer = make_trainer(advantage_fn=lambda graph: np.zeros(graph.num_steps), beta=0.0)
    before = flat_weights(trainer)
    trainer.train()
    assert torch.equal(flat_weights(trainer), before)
    logs = [log for log in trainer.state.log_history if "update/left_out_fraction" in log]
    assert all(log["update/left_out_fraction"] == 1 and log["update/forwarded_tokens"] == 1 for log in logs)
    assert not any("entropy" in log or "clip_ratio/low_mean" in log for log in logs), "not 0: nothing was measured"


def test_gradient_without_rows_of_no_advantage_is_the_same(make_trainer):
    """For every loss, as denominators count them. With a KL term only rows that are not trained are left out."""
    trainer = make_trainer(LongLetterEnvironment, beta=0.0, steps_per_generation=2, max_tokens_per_micro_batch=200)
    batch = play_batch(trainer)
    advantages = batch.advantages[:] = np.random.default_rng(0).integers(-1, 2, len(batch))
    gone = 1 - np.mean(batch.trained & (advantages != 0))
    for loss_type in LOSSES:
        trainer.loss_type = trainer.update.config.loss_type = loss_type
        found = {}
        for beta in (0.0, 1.0):
            trainer.update.log_probs.beta = beta
            mini_batches, metrics = trainer.update.split([batch])
            rows = sum(len(m["advantages"]) for p in mini_batches for m in p)
            trainer.update.log_probs.beta = 0.0
            for part in mini_batches:
                trainer._add_log_probs([part])
            gradients = [flat_gradient(trainer, part) for part in mini_batches]
            found[beta] = gradients, metrics["update/left_out_fraction"], rows
        (without, left_out, few), (whole, _, many) = found[0.0], found[1.0]
        assert left_out == pytest.approx(gone) and 0.3 < gone < 0.6
        assert few == round((1 - gone) * len(batch)) and many == sum(batch.trained), loss_type
        for slice_without, slice_whole in zip(without, whole):
            assert slice_whole.norm() > 0
            assert (slice_without - slice_whole).norm() < 1e-5 * slice_whole.norm(), loss_type


def test_train_on_letters_raises_the_success_rate(make_trainer, tmp_path):
    options = {"per_device_train_batch_size": 32, "num_generations": 8, "steps_per_generation": 2, "max_steps": 50}
    options |= {"max_completion_length": 1, "learning_rate": 6e-3, "beta": 0.0, "eval_temperature": 1.0}
    trainer = make_trainer(eval_dataset=TASKS, num_generations_eval=8, **options)
    before = trainer.evaluate()["eval_success_rate"]
    trainer.train()
    after = trainer.evaluate()["eval_success_rate"]
    assert before < 0.3 and after > 0.8
    entries = read_json_lines(tmp_path / "out" / "evaluations.jsonl")
    assert [entry["success_rate"] for entry in entries] == [before, after]
    assert entries[0]["panel"] == entries[1]["panel"] and entries[0]["episodes"] == 64


@pytest.mark.filterwarnings("ignore:output_dir is .*, which holds another run")
def test_evaluate_at_two_temperatures_is_two_panels_that_repeat_exactly(make_trainer, tmp_path):
    options = {"eval_dataset": TASKS, "num_generations_eval": 4}
    trainer = make_trainer(eval_temperature=1.0, other_eval_temperatures=[0.5], **options)
    state = torch.random.get_rng_state()
    both = trainer.evaluate()
    assert torch.equal(torch.random.get_rng_state(), state)
    entries = read_json_lines(tmp_path / "out" / "evaluations.jsonl")
    assert [(one["name"], one["temperature"]) for one in entries] == [("eval_t0_5", 0.5), ("eval", 1.0)]
    assert [both[f"{one['name']}_success_rate"] for one in entries] == [one["success_rate"] for one in entries]

    def comparable(metrics, prefix="eval"):
        same = {name: value for name, value in metrics.items() if value == value and "runtime" not in name}
        return {name.replace("eval", prefix, 1): value for name, value in same.items()}

    assert comparable(trainer.evaluate()) == comparable(both), "again"
    alone = make_trainer(eval_temperature=0.5, overwrite=True, **options).evaluate()
    assert comparable(alone, "eval_t0_5").items() < comparable(both).items()
    assert before_and_after(entries)[1] == entries[1]


def test_killed_worker_becomes_error_trajectories(make_trainer):
    options = {"per_device_train_batch_size": 32, "num_environment_workers": 2, "max_steps": 2, "max_error_rate": 0.9}
    trainer = make_trainer(SuicidalEnvironment, **options)
    trainer.train()
    assert trainer.state.global_step == 2
    for iteration, entry in enumerate([e for e in trainer.state.log_history if "episode/error_rate" in e], 1):
        trajectories = played_in(trainer, iteration)
        errors = [t for t in trajectories if t.outcome == "error"]
        finished = [t for t in trajectories if t.outcome != "error"]
        assert len(trajectories) == 32 and errors and finished
        assert all("crash" in t.error for t in errors)
        assert entry["episode/error_rate"] == pytest.approx(len(errors) / 32)
        assert entry["episode/success_rate"] == pytest.approx(np.mean([t.success for t in finished]))
        assert entry["update/step_samples"] == sum(len(t.steps) for t in finished)


class WordyEnvironment(LetterEnvironment):
    """The goal of every other task is too long for a short prompt."""

    def reset(self, seed):
        return replace(super().reset(seed), task="go " * (200 * (seed % 2) + 1))


def test_prompts_too_long_to_fit_are_failures_up_to_max_error_rate(make_trainer):
    """Of eight tasks four have a goal that is too long; the other four train."""
    options = {"per_device_train_batch_size": 32, "max_prompt_length": 60, "max_steps": 1}
    trainer = make_trainer(WordyEnvironment, **options)
    trainer.train()
    (entry,) = (e for e in trainer.state.log_history if "episode/error_rate" in e)
    assert entry["episode/failure_reason_rate"] == 0.5 and entry["episode/error_rate"] == 0
    assert entry["episode/success_rate"] <= 0.5 and entry["update/step_samples"] == 32
    trainer = make_trainer(WordyEnvironment, max_error_rate=0.4, overwrite=True, **options)
    with refused("max_error_rate"):
        trainer.train()


def game(**methods):
    return {"environment": type("Game", (LetterEnvironment,), methods)}


FIXED = {"advantage_fn": lambda graph: np.zeros(graph.num_steps)}
WRONG = [  # arguments, and the field that is refused
    ({"environment": LetterEnvironment()}, "environment_factory"),
    ({"environment": None}, "environment_factory"),
    (game(reset=lambda self, seed: 5), "Game"),
    (game(step=lambda self, action: StepResult("hall", float("nan"), True)), "Game"),
    (game(step=lambda self, action: 1 / 0), "division by zero"),
    ({"dataset": Dataset.from_list([{"house": 1}])}, "seed"),
    ({"dataset": Dataset.from_list([{"seed": 1}])}, "train_dataset"),
    ({"reward_weights": [2.0]}, "reward_weights"),
    *(({name: key}, "state_key") for name, key in (("key_function", "similar"), ("state_key", "files"))),
    ({**FIXED, "advantage_estimator": "grpo"}, "advantage_estimator"),
]


@pytest.mark.parametrize(("options", "field"), WRONG)
def test_arguments_that_do_not_fit_are_refused_by_their_field(make_trainer, options, field):
    with pytest.raises(ValueError, match=field):
        make_trainer(**options)


def test_what_another_trainer_takes_is_refused(tmp_path, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = None
    for field, options in (
        ("args", {"args": GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)}),
        ("reward_funcs", {"reward_funcs": len}),
        ("rollout_func", {"rollout_func": len}),
        ("chat_template", {"processing_class": tokenizer}),
        ("environment_factory", {"agent": lambda task, client: 1.0}),
        ("agent", {"agent": 5, "environment_factory": None}),
    ):
        given = {"args": make_config(tmp_path), "environment_factory": LetterEnvironment, **options}
        with pytest.raises((ValueError, TypeError), match=field):
            G2POTrainer(str(tiny_model_dir), train_dataset=TASKS, **given)


def test_training_refuses_settings_that_were_changed_and_advantages_of_another_length(make_trainer):
    trainer = make_trainer()
    trainer.args.temperature = 0.5
    with refused("temperature"):
        trainer.train()
    with refused("advantage_fn"):
        make_trainer(advantage_fn=lambda graph: np.zeros(3)).train()


def test_a_panel_is_evaluated_by_its_name(make_trainer, tmp_path):
    trainer = make_trainer(eval_dataset={"a": TASKS, "b": TASKS})
    assert "eval_b_success_rate" in trainer.evaluate("b")
    assert [line["name"] for line in read_json_lines(tmp_path / "out" / "evaluations.jsonl")] == ["eval_b"]
    assert "eval_a_success_rate" in trainer.evaluate("a", metric_key_prefix="eval_a")  # as transformers' callers do
    with refused("eval_dataset"):
        trainer.evaluate("c")
    with pytest.raises(G2POError, match="lettre"):  # before it is played
        trainer.evaluate(Dataset.from_list([{"lettre": "a"}]))


def test_train_called_again_begins_with_a_rollout_and_keeps_its_optimizer(make_trainer):
    """A rollout that the first call left in the middle is not trained on; transformers keeps the optimizer."""
    trainer = make_trainer(max_steps=1, steps_per_generation=2, gradient_accumulation_steps=1, num_iterations=2)
    trainer.train()
    assert trainer.iteration.step == 1 and not trainer.iteration.is_complete
    trainer.train()
    assert trainer.iteration.step == 5 and len(list(Path(trainer.args.output_dir, "trajectories").glob("*"))) == 2
