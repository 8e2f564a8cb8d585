"""`G2POTrainer` beside TRL's own `GRPOTrainer(environment_factory=…)`: the same games, the same tiny model.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.against_trl --output benchmarks/results/against_trl [--repetitions 5]

A repetition is one training iteration (rollout, one optimizer step) of each side in turn, from the same weights, on
games neither has played. The first warms up and is dropped; who begins alternates. Prints and writes every value and
medians; seconds are wall clock, and `generate` and the environments are part of the rollout.

Equal: games and their order, groups of 8, the bounds on environment steps and on a completion's tokens, sampling,
reward (10 for a win, nothing else), loss, learning rate, optimizer, beta 0, float32 on the CPU, `generate`, and what
the model reads at the first step, to the letter. Hooks on the model and a callback measure both sides alike: the
update begins with the first forward pass that keeps gradients.

Unequal, for it is what is compared:

- Sample. Ours is a step: a prompt built anew of the task, two past steps and the observation. TRL's is a conversation:
  all observations and completions so far, which `generate` reads from the start again at every turn. Both train
  completions.
- What the model knows. It was taught on our prompts; conversations are new to it, and it wins fewer games in them. A
  chat template and a response template make its `<action>` tags a tool call; an answer is "Seen: … Actions: …".
- Lengths. A conversation that reaches the model's context ends there; `--context` raises it, to positions the model
  has not learnt. TRL has one limit for a completion and for all of a conversation; a completion's is
  `generation_kwargs` here.
- Ends. TRL's tools cannot end an episode: after a win the model is asked on until it writes no call or is out of
  calls, and after the last call it is asked once more. A completion without `<action>` ends TRL's episode;
  ours plays its last 30 characters. A second action of one completion is played by TRL alone.
- Credit. TRL's is the episode's advantage for all its completions; ours is G2PO's, step by step.
- Environments step one after the other in TRL's process, and in a worker process for each core in ours.
- Batches. TRL pads to the iteration's longest conversation, 2 a forward pass (no slower than 1, 4 or 8); ours are
  steps of like length, 2,048 tokens a forward pass, as in the recipe.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import facts, machine, medians, write_results
from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, Manifest, generate_games
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment, tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer

MODEL, DONE, GROUP_SIZE, COMPLETION_TOKENS, CONVERSATIONS = str(tiny_model_path()), "The task is done.", 8, 24, 2
# The tokenizer's own, with answers as if a user gave them. Calls are only rendered when TRL tries the template: a
# conversation goes on from the tokens that were written.
CHAT_TEMPLATE = """{% for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = {"type": "function", "function": {"name": "act", "arguments": {"action": "{content}"}}}
ACTION = {"open": "<action>", "close": "</action>", "repeats": True, "content": "text", "transform": CALL}
FIELDS = {"tool_calls": ACTION, "content": {"close": "<|im_end|>", "content": "text"}}
RESPONSE_TEMPLATE = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": FIELDS}
MEASURED = """seconds, iteration; seconds, rollout; seconds, generate; seconds, environment; seconds, update; \
updates a second; episodes a second, rollout; environment steps a second, rollout; tokens forwarded in rollout; \
tokens forwarded in update; of these padding; forward passes of update; samples trained; completions of an episode; \
environment steps; calls after win; conversations cut; games won""".split("; ")
UPDATE = {"num_generations": GROUP_SIZE, "beta": 0.0, "learning_rate": 5e-4, "lr_scheduler_type": "constant"}
MACHINE = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
RUN = {"max_steps": 1, "shuffle_dataset": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
COMMON = {**UPDATE, **MACHINE, **RUN, "logging_steps": 1}


@contextmanager
def timed(tally: Counter, name: str):
    started = time.perf_counter()
    yield
    tally[name] += time.perf_counter() - started


class House:
    """An ALFWorld game in TRL's style. What is counted goes to `tally`, which all episodes share."""

    def __init__(self, manifest: Manifest, tally: Counter):
        self._game, self._tally = tiny_environment(manifest), tally

    def reset(self, task_id: str, **row) -> str:
        with timed(self._tally, "seconds, environment"):
            seen, self._won = self._game.reset(task_id), False
        return ALFWORLD_COMPACT_PROMPT.messages(seen.text, seen.task, seen.admissible_actions)[0]["content"]

    def act(self, action: str) -> str:
        """Act in the house.

        Args:
            action: one of the admissible actions.
        """
        if self._won:
            self._tally["calls after win"] += 1
            return DONE
        with timed(self._tally, "seconds, environment"):
            result = self._game.step(action.strip().lower())
        self._tally["environment steps"] += 1
        seen, self._won = result.observation, result.terminated
        return DONE if self._won else "\n".join([f"Seen: {seen.text}", "Actions:", *seen.admissible_actions])

    def get_reward(self) -> float:
        self._tally["games won"] += self._won
        return self._game.success_reward * self._won


class Probe(TrainerCallback):
    """Seconds and tokens of an iteration, the same way on both sides."""

    def __init__(self, trainer: GRPOTrainer, tally: Counter):
        self.tally, self.pad = tally, trainer.processing_class.pad_token_id
        trainer.model.register_forward_pre_hook(self.on_forward, with_kwargs=True)
        trainer.model.generate = timed(tally, "seconds, generate")(trainer.model.generate)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def on_forward(self, model, args, kwargs) -> None:
        ids, phase = kwargs["input_ids"], "rollout"
        if torch.is_grad_enabled():
            self.updating_since, phase = self.updating_since or time.perf_counter(), "update"
            self.tally["forward passes of update"] += 1
            self.tally["of these padding"] += int((ids == self.pad).sum())
        self.tally[f"tokens forwarded in {phase}"] += ids.numel()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.started, self.updating_since = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.tally["seconds, rollout"] = self.updating_since - self.started
        self.tally["seconds, update"] = now - self.updating_since
        self.tally["seconds, iteration"] = now - self.started


def make_ours(options: argparse.Namespace, manifest: Manifest, tasks: Dataset, tally: Counter) -> G2POTrainer:
    args = G2POConfig(
        output_dir=options.folder,
        **COMMON,
        per_device_train_batch_size=GROUP_SIZE * options.groups,
        max_turns=options.turns,
        history_length=HISTORY_LENGTH,
        max_prompt_length=options.context - COMPLETION_TOKENS,
        max_completion_length=COMPLETION_TOKENS,
        invalid_action_penalty=0.0,
        save_trajectories=False,
        overwrite=True,  # each measurement is a run of its own
        **{"max_tokens_per_micro_batch": 2048, **options.g2po},
    )
    environment = partial(tiny_environment, manifest)
    return G2POTrainer(MODEL, args, tasks, None, environment, ALFWORLD_COMPACT_PROMPT)


def make_trl(options: argparse.Namespace, manifest: Manifest, tasks: Dataset, tally: Counter) -> GRPOTrainer:
    args = GRPOConfig(
        output_dir=options.folder,
        **COMMON,
        per_device_train_batch_size=CONVERSATIONS,
        gradient_accumulation_steps=GROUP_SIZE * options.groups // CONVERSATIONS,  # one step a rollout
        max_tool_calling_iterations=options.turns,
        max_completion_length=options.context,
        generation_kwargs={"max_new_tokens": COMPLETION_TOKENS},
        model_init_kwargs={"max_position_embeddings": options.context},
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE

    def count(completions, **columns) -> list[float]:
        """A reward function that pays nothing: it sees how conversations ended."""
        for messages in completions:
            written = sum(message["role"] == "assistant" for message in messages)
            tally.update({"samples trained": 1, "completions": written})
            tally["conversations cut"] += written <= options.turns and bool(messages[-1].get("tool_calls"))
        return [0.0] * len(completions)

    house = partial(House, manifest, tally)
    return GRPOTrainer(MODEL, count, args, tasks, processing_class=tokenizer, environment_factory=house)


def iterate(trainer: GRPOTrainer, tally: Counter, start: dict, tasks: Dataset, seed: int) -> dict[str, float]:
    """One training iteration from the weights `start`: what it cost and what it was."""
    tally.clear()
    trainer.model.load_state_dict(start)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train_dataset, trainer.args.seed = tasks, seed
    trainer.train()
    log, episodes = trainer.state.log_history[0], GROUP_SIZE * len(tasks)
    if isinstance(trainer, G2POTrainer):
        tally["environment steps"] = tally["completions"] = tally["samples trained"] = int(log["update/step_samples"])
        tally["games won"] = round(log["episode/success_rate"] * episodes)
        tally["seconds, environment"] = log["time/environment"]
    tally["updates a second"] = 1 / tally["seconds, iteration"]
    tally["episodes a second, rollout"] = episodes / tally["seconds, rollout"]
    tally["environment steps a second, rollout"] = tally["environment steps"] / tally["seconds, rollout"]
    tally["completions of an episode"] = tally["completions"] / episodes
    return {name: round(tally[name], 4) for name in MEASURED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for results.json")
    parser.add_argument("--repetitions", type=int, default=5, help="besides the one that warms up")
    parser.add_argument("--groups", type=int, default=4, help="games of an iteration, 8 episodes each")
    parser.add_argument("--turns", type=int, default=15, help="environment steps of an episode")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a conversation; the model's are 1024")
    parser.add_argument("--g2po", type=json.loads, default={}, help="more fields of G2POConfig, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the games; repetition i samples with this plus i")
    options = parser.parse_args()
    seeds = {"games": options.seed, "repetitions": [options.seed + 1 + i for i in range(options.repetitions)]}
    result = facts("torch", "trl", "transformers", seeds=seeds)
    print(json.dumps(result, indent=1), flush=True)
    with tempfile.TemporaryDirectory() as options.folder:
        values = measure(options)
    middle = {name: medians(raw) for name, raw in values.items()}
    ratios = {key: round(middle["trl"][key] / of, 3) if of else None for key, of in middle["g2po"].items()}
    result |= {"load after": machine()["load"], "values": values, "medians": middle, "trl / g2po": ratios}
    print("\n| median of an iteration | g2po | trl | trl / g2po |\n|---|---|---|---|")
    for key, ratio in ratios.items():
        print(f"| {key} | {middle['g2po'][key]:.6g} | {middle['trl'][key]:.6g} | {'' if ratio is None else ratio} |")
    if options.output:
        write_results(options.output, result)


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """[side][what is measured]: the value of each repetition."""
    number = options.groups * (options.repetitions + 1)
    manifest = generate_games(f"{options.folder}/games", "train", number, options.seed, "tiny", progress=False)
    tasks = Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], **row} for row in manifest.rows()])
    tallies, trainers = {"g2po": Counter(), "trl": Counter()}, {}
    for name, make in (("g2po", make_ours), ("trl", make_trl)):
        trainers[name] = make(options, manifest, tasks, tallies[name])
        Probe(trainers[name], tallies[name])
    start = {key: weights.clone() for key, weights in trainers["trl"].model.state_dict().items()}
    values: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}
    for repetition in range(options.repetitions + 1):
        batch = tasks.select(range(repetition * options.groups, (repetition + 1) * options.groups))
        for name in list(trainers)[:: 1 if repetition % 2 else -1]:
            measured = iterate(trainers[name], tallies[name], start, batch, options.seed + repetition)
            print(f"{repetition or 'warm-up'} {name}: {json.dumps(measured)}", flush=True)
            for key, value in measured.items() if repetition else ():
                values[name].setdefault(key, []).append(value)
    trainers["g2po"].close()
    return values


if __name__ == "__main__":
    main()
