"""Small runs of the trainer, with all that their losses saw and what they did by other clocks and counters."""

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT
from letter_trainer import make_config
from metric_environments import Goals, Ladder
from scripted_actors import ScriptedStream
from transformers import AutoModelForCausalLM, TrainerCallback

from g2po_trl import G2POConfig, G2POTrainer, PPOConfig, PPOTrainer
from g2po_trl.engines.base import Completion
from g2po_trl.engines.registry import ENGINES

TRIALS = [{"seed": n, "task_id": f"t{n}", "task_type": ("odd", "even")[n % 2], "goal": "go"} for n in range(6)]
TRIALS += [{"seed": 6, "task_id": "wordy", "task_type": "even", "goal": "go " * 200}]
TRIALS += [{"seed": 8, "task_id": "broken", "task_type": "even", "goal": "break"}]
LADDERS = [{"turns": 2 + n % 4, "reward": 10.0 * (n % 3 > 0), "task_id": str(n)} for n in range(12)]

# In turns, with the columns of both.
COLUMNS = dict.fromkeys([*TRIALS[0], *LADDERS[0]])
SEVERAL = [
    {**COLUMNS, **row, "environment": name}
    for pair in zip(TRIALS, LADDERS)
    for name, row in zip(("trials", "ladder"), pair)
]

SHARED = {"disable_tqdm": True, "max_grad_norm": 1e6, "learning_rate": 5e-3, "max_prompt_length": 90, "max_steps": 2}
SHARED |= {"per_device_train_batch_size": 16, "max_error_rate": 1.0}
RUNS = {
    # several slices, each trained twice, an evaluation and a checkpoint after each step
    "slices": {
        **{"learning_rate": 3e-2, "beta": 0.05, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 8},
        **{"task_error_patience": 1, "max_tokens_per_micro_batch": 1000, "eval_strategy": "steps", "eval_steps": 3},
        **{"save_strategy": "steps", "save_steps": 3, "save_total_limit": 9, "num_generations_eval": 2},
    },
    "dynamic": {
        **{"rollout_strategy": "dynamic_sampling", "rollout_strategy_kwargs": {"max_generation_batches": 3}},
        **{"environment": Ladder, "tasks": LADDERS, "beta": 0.0, "max_steps": 3},
    },
    "ppo": {
        **{"config_class": PPOConfig, "critic_epochs": 3, "critic_mini_batches": 1, "value_clip_range": 0.1},
        **{"critic_learning_rate": 1e-2},
    },
    "streamed": {
        **{"advantage_estimator": "gigpo", "mask_truncated_completions": True, "token_layout": "padded"},
        **{"max_completion_length": 4, "max_tokens_per_micro_batch": 300},
    },
    "several": {
        "environment": {"trials": Goals, "ladder": Ladder},
        "tasks": [{**row, "task_id": f"{row['environment']} {row['task_id']}"} for row in SEVERAL],
        **{"per_device_train_batch_size": 32, "max_turns": 9, "max_episode_tokens": 8, "beta": 0.0},
        **{"environment_limits": {"ladder": {"max_turns": 4}}, "eval_strategy": "steps", "eval_steps": 1},
    },
    "conversation": {"history": "conversation", "beta": 0.0},
}


class CachedLetters(ScriptedStream):
    """Says letters, with a prefix cache as vLLM has, and not always to the end."""

    idle = 0.0

    @classmethod
    def of_trainer(cls, parts):
        return cls(parts.tokenizer)

    def complete(self, key, prompt, sampling, seed):
        chosen = random.Random(f"{key} {prompt} {seed}")
        ids = self.tokenizer(chosen.choice("amnopqz") + "go" * chosen.randint(0, 2))["input_ids"]
        logprobs = [-5.0 - chosen.random() / 10 for _ in ids]
        cached = None if len(ids) == 1 else 10 * len(ids)
        return Completion(ids, logprobs, complete=sum(ids) % 4 > 0, cached_tokens=cached)


class Recorded(TrainerCallback):
    """What a run's losses saw. By the iteration's number, from 1: `losses`, of each micro-batch its rows and training
    step; `passes`, its forward passes. `weights`: those that each training step began with. `norms`: of the gradient
    at each optimizer step.
    """

    def __init__(self, trainer):
        self.trainer, self.args = trainer, trainer.args
        self.losses, self.passes = defaultdict(list), defaultdict(list)
        self.weights, self.norms = [], []
        self._batch = self._model = None
        trainer.add_callback(self)
        self._wrap(trainer, "training_step", self._training_step)
        self._wrap(trainer, "compute_loss", self._compute_loss)
        body = trainer.accelerator.unwrap_model(trainer.model).base_model
        body.register_forward_pre_hook(self._forward, with_kwargs=True)

    @property
    def number(self):
        return self.trainer.iteration.number

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        self.norms.append(gradient.norm().item())

    def _wrap(self, owner, name, wrapper):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *arguments, **options: wrapper(inner, *arguments, **options))

    def _training_step(self, inner, *arguments, **options):
        state = self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict()
        self.weights.append({name: value.detach().clone() for name, value in state.items()})
        return inner(*arguments, **options)

    def _compute_loss(self, inner, model, inputs, *arguments, **options):
        self._batch = inputs
        loss = inner(model, inputs, *arguments, **options)
        self.losses[self.number].append({"rows": rows_of(inputs), "step": len(self.weights) - 1})
        self._batch = None
        return loss

    def _forward(self, module, arguments, named):
        if self._batch is None or not torch.is_grad_enabled():
            return
        texts = [torch.cat([row["prompt"], row["completion"]]).tolist() for row in rows_of(self._batch)]
        # those that texts begin with in common are laid out once
        tokens = len({tuple(text[:stop]) for text in texts for stop in range(1, len(text) + 1)})
        step = len(self.weights) - 1
        self.passes[self.number].append({"step": step, "positions": named["input_ids"].numel(), "tokens": tokens})

    def model_of(self, step):
        """The policy as a training step found it; the same object each time."""
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self.trainer.model.config._name_or_path).eval()
        self._model.load_state_dict(self.weights[step])
        return self._model


def rows_of(batch):
    rows = []
    for number, mask in enumerate(batch["completion_mask"].bool()):
        if mask.any():
            prompt = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
            completion, advantage = batch["completion_ids"][number][mask], batch["advantages"][number].item()
            rows.append({"prompt": prompt, "completion": completion, "advantage": advantage})
    return rows


def make_recorded(name: str, model: Path, output: Path, monkeypatch) -> Recorded:
    options = dict(RUNS[name])
    environment, tasks = options.pop("environment", Goals), options.pop("tasks", TRIALS)
    config = make_config(output, options.pop("config_class", G2POConfig), **SHARED | options)
    if name == "streamed":
        monkeypatch.setitem(ENGINES, "transformers", SimpleNamespace(load=lambda: CachedLetters))
    trainer_class = PPOTrainer if isinstance(config, PPOConfig) else G2POTrainer
    tasks = Dataset.from_list(tasks)
    panel = tasks.select(range(5)) if config.eval_strategy != "no" else None
    return Recorded(trainer_class(str(model), config, tasks, panel, environment, LETTER_PROMPT))
