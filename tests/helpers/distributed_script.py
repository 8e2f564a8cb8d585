"""Trains on episodes that do not depend on chance and writes weights and log; run alone or under torchrun."""

import json
import os
import sys
from dataclasses import replace
from functools import partial

import sharding
import torch
import vision_models
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment, LongLetterEnvironment
from letter_trainer import make_config
from peft import LoraConfig

from g2po_trl import G2POConfig, G2POTrainer, Observation, PPOConfig, PPOTrainer, StepResult
from g2po_trl.agents.agent import AgentEnvironment
from g2po_trl.engines.transformers import TransformersEngine


class DrawnRoomsEnvironment(LetterEnvironment):
    """An episode of `seed` steps, which draws its rooms, except those of task 1."""

    def reset(self, seed):
        self.seed = self.left = seed
        return replace(super().reset(seed), images=self.drawn())

    def drawn(self):
        return [vision_models.drawing(self.left, 16 + 8 * self.left)] * (self.seed != 1)

    def step(self, action):
        self.left -= 1
        seen = Observation(f"room {self.left}", images=self.drawn())
        return StepResult(seen, reward=float(self.left), terminated=self.left == 0)


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


def speaker(task, client):
    """Asks a task's number of times, each time with other stops, as agents do."""
    ask, messages = client.openai().chat.completions.create, [{"role": "user", "content": f"hall {task['seed']}"}]
    if task["seed"] == 0:
        raise RuntimeError("broken before it asks")
    said = ""
    for turn in range(task["seed"]):
        stop = {"stop": [chr(97 + turn)]} if turn % 2 else {}
        answer = ask(model=client.model, messages=messages, **stop).choices[0].message.content or ""
        said += answer
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"room {turn} {answer[:1]}"},
        ]
    return float(len(said))


# name -> (environment, tasks in order, trajectories of a group, trajectories of a rollout)
SCENARIOS = {
    "groups over both ranks": (LongLetterEnvironment, [0, 1, 2, 3], 8, 16),
    "three times the samples": (FixedLengthEnvironment, [6, 2, 6, 2], 8, 16),
    "a rank of errors": (FixedLengthEnvironment, [3, 0, 4, 0], 8, 16),
    "agents": (partial(AgentEnvironment, agent=speaker, max_turns=6), [3, 0, 4, 2], 8, 16),
    "groups without variance": (LongLetterEnvironment, [0, 1, 2, 3], 8, 16),
    "mini-batches": (LongLetterEnvironment, [0, 1, 2, 3], 8, 16),
    "images": (DrawnRoomsEnvironment, [3, 1, 2, 1], 8, 16),
    "an adapter": (LongLetterEnvironment, [0, 1, 2, 3], 8, 16),
    "random lengths": (LongLetterEnvironment, list(range(16)), 4, 8),
}


def advantages(graph):
    """Anything that differs from step to step and needs all groups."""
    return graph.position - 0.3 * graph.trajectory + graph.returns - graph.returns.mean()


def of_every_other_group(graph):
    """0 for half of the groups, and for all of them in every other rollout."""
    of_every_other_group.rollouts += 1
    group = graph.trajectory // 8
    return advantages(graph) * (group % 2) * (of_every_other_group.rollouts % 2)


of_every_other_group.rollouts = 0


def build(model, output, scenario, loss_type, kind, **kwargs):
    environment, seeds, num_generations, rollout = SCENARIOS[scenario]
    options = {
        "per_device_train_batch_size": rollout // 2 // int(os.environ.get("WORLD_SIZE", 1)),
        "steps_per_generation": 2,
        "num_generations": num_generations,
        "max_completion_length": 3,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "loss_type": loss_type,
        "beta": 0.1,
        "max_tokens_per_micro_batch": 200,
        "top_k": 1,  # the same completions on any number of processes
        "max_error_rate": 1.0,
        "shuffle_dataset": False,
        "max_grad_norm": 100.0,
        "eval_on_start": True,
        "logging_steps": 1,
    }
    if scenario == "three times the samples" and loss_type != "ppo":
        options |= {"state_key": "similar:0.15"}  # merges rooms, over ranks
    if scenario == "mini-batches":
        options |= {
            "steps_per_generation": 1,
            "per_device_train_batch_size": 2 * options["per_device_train_batch_size"],
        }
        options |= {"mini_batch_size": 20, "max_steps": 2, "max_grad_norm": 0.05}
    if scenario == "groups without variance":
        options |= {"beta": 0.0}
    if ppo := loss_type == "ppo":
        # Adam would blow rounding errors of gradients near 0 up to whole steps.
        options |= {"loss_type": "dapo", "critic_epochs": 2, "critic_learning_rate": 1e-2, "adam_epsilon": 1e-3}
    args = make_config(output, PPOConfig if ppo else G2POConfig, **{**options, **sharding.prepare(kind), **kwargs})
    sharding.pretend(kind)
    tasks = Dataset.from_list([{"seed": seed} for seed in seeds])
    if ppo:
        return PPOTrainer(model, args, tasks, tasks, environment, LETTER_PROMPT)
    estimate = of_every_other_group if scenario == "groups without variance" else advantages
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]) if scenario == "an adapter" else None
    return G2POTrainer(model, args, tasks, tasks, environment, LETTER_PROMPT, estimate, peft_config=lora)


def watch_generation() -> list[list[int]]:
    """From now on: the lengths of each generate call's prompts."""
    calls, generate = [], TransformersEngine._generate

    def watched(engine, model, config, prompts, *args):
        calls.append([len(prompt) for prompt in prompts])
        return generate(engine, model, config, prompts, *args)

    TransformersEngine._generate = watched
    return calls


def main(model, output, scenario, loss_type, kind="none", resume=None):
    kwargs = {}
    if scenario == "random lengths":
        kwargs = {"top_k": 0, "max_steps": 100, "generation_batch_tokens": 150}
    if resume:
        kwargs = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 10, "optim": "adamw_torch"}
    trainer = build(model, output, scenario, loss_type, kind, **kwargs)
    # As under sharded weights: every rank takes part in every call, with a dummy when its episodes have ended.
    trainer.player.actor.engine.is_collective |= scenario == "random lengths"
    calls = watch_generation()
    trainer.train(resume_from_checkpoint=resume)
    sharding.check(trainer, kind)
    torch.save(sharding.whole_weights(trainer, kind), f"{output}/weights-{trainer.accelerator.process_index}.pt")
    with open(f"{output}/calls-{trainer.accelerator.process_index}.json", "w") as file:
        json.dump(calls, file)
    trainer.save_model()
    if loss_type == "ppo":
        critic = torch.cat([p.detach().flatten() for p in trainer.critic.parameters])
        torch.save(critic, f"{output}/critic-{trainer.accelerator.process_index}.pt")
    if trainer.accelerator.is_main_process:
        with open(f"{output}/log.json", "w") as file:
            json.dump(trainer.state.log_history, file)
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
