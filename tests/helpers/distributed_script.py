"""Trains on episodes that do not depend on chance and writes weights and log; run alone or under torchrun."""

import json
import os
import sys
from pathlib import Path

import mixed_games
import sharding
import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment, LongLetterEnvironment
from letter_trainer import make_config
from peft import LoraConfig

from g2po_trl import G2POConfig, G2POTrainer, PPOConfig, PPOTrainer, StepResult, tasks_dataset
from g2po_trl.engines.transformers import TransformersEngine


class FixedLengthEnvironment(LetterEnvironment):
    """An episode of `seed` steps, whatever is said; of 0, one that breaks."""

    def reset(self, seed):
        self.left = seed
        return super().reset(seed)

    def step(self, action):
        if self.left == 0:
            raise RuntimeError("broken")
        self.left -= 1
        self.rooms.append(f"room {self.left} {action[:1]}")
        return StepResult(self.rooms[-1], reward=float(len(self.rooms)), terminated=self.left == 0)


SCENARIOS = {  # name -> environment, and tasks in order
    "groups over both ranks": (LongLetterEnvironment, [0, 1, 2, 3]),
    "three times the samples": (FixedLengthEnvironment, [6, 2, 6, 2]),
    "a rank of errors": (FixedLengthEnvironment, [3, 0, 4, 0]),
    "mini-batches": (LongLetterEnvironment, [0, 1, 2, 3]),
    "an adapter": (LongLetterEnvironment, [0, 1, 2, 3]),
    "random lengths": (LongLetterEnvironment, list(range(16))),
    "several environments": ({"lamp": mixed_games.Lamp, "shop": mixed_games.Shop}, []),
}


def advantages(graph):
    """Anything that differs from step to step and needs all groups."""
    return graph.position - 0.3 * graph.trajectory + graph.returns - graph.returns.mean()


def build(model, output, scenario, loss_type, kind, **kwargs):
    environment, seeds = SCENARIOS[scenario]
    size = 8 // int(os.environ.get("WORLD_SIZE", 1))
    options = {
        **{"per_device_train_batch_size": size, "steps_per_generation": 2, "num_generations": 8, "optim": "sgd"},
        **{"max_completion_length": 3, "max_steps": 4, "learning_rate": 1e-2, "loss_type": loss_type, "beta": 0.1},
        **{"max_tokens_per_micro_batch": 200, "max_error_rate": 1.0, "shuffle_dataset": False, "logging_steps": 1},
        **{"max_grad_norm": 100.0, "eval_on_start": True},
        "top_k": 1,  # the same completions on any number of processes
    }
    others = {"advantage_fn": advantages}
    if scenario == "three times the samples":
        options |= {"state_key": "similar:0.15"}  # merges rooms, over ranks
    if scenario == "mini-batches":
        options |= {"steps_per_generation": 1, "per_device_train_batch_size": 2 * size}
        options |= {"mini_batch_size": 20, "max_steps": 2, "max_grad_norm": 0.05}
    if scenario == "random lengths":
        options |= {"per_device_train_batch_size": size // 2, "num_generations": 4}
        options |= {"top_k": 0, "max_steps": 100, "generation_batch_tokens": 150}
    if scenario == "an adapter":
        others["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    if ppo := loss_type == "ppo":
        # Adam would blow rounding errors of gradients near 0 up to whole steps.
        options |= {"loss_type": "dapo", "critic_epochs": 2, "critic_learning_rate": 1e-2, "adam_epsilon": 1e-3}
        others = {}
    args = make_config(output, PPOConfig if ppo else G2POConfig, **{**options, **sharding.prepare(kind), **kwargs})
    sharding.pretend(kind)
    tasks, prompt = Dataset.from_list([{"seed": seed} for seed in seeds]), LETTER_PROMPT
    if scenario == "several environments":  # whole groups are on one rank
        tasks, prompt, others["agent"] = tasks_dataset(mixed_games.ROWS), None, {"speaker": mixed_games.speaker}
    trainer_class = PPOTrainer if ppo else G2POTrainer
    return trainer_class(model, args, tasks, tasks, environment, prompt, **others)


def main(model, output, scenario, loss_type, kind="none", resume=None):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 10, "optim": "adamw_torch"}
    trainer = build(model, output, scenario, loss_type, kind, **(saving if resume else {}))
    rank, calls, generate = trainer.accelerator.process_index, [], TransformersEngine._generate

    def watched(engine, model, config, prompts, *args):
        calls.append([len(prompt) for prompt in prompts])
        return generate(engine, model, config, prompts, *args)

    TransformersEngine._generate = watched
    # As under sharded weights: every rank takes part in every call, with a dummy when its episodes have ended.
    trainer.player.actor.engine.is_collective |= scenario == "random lengths"
    trainer.train(resume_from_checkpoint=resume)
    sharding.check(trainer, kind)
    torch.save(sharding.whole_weights(trainer, kind), f"{output}/weights-{rank}.pt")
    Path(output, f"calls-{rank}.json").write_text(json.dumps(calls))
    trainer.save_model()
    if loss_type == "ppo":
        torch.save(torch.cat([p.detach().flatten() for p in trainer.critic.parameters]), f"{output}/critic-{rank}.pt")
    if rank == 0:
        Path(output, "log.json").write_text(json.dumps(trainer.state.log_history))
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
