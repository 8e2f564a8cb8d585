"""How well the tiny model plays: the real rollout, in this process.

`python -m g2po_envs.alfworld.tiny_evaluation MODEL --games FOLDER`. What a training run measures is the trainer's own
evaluation; this one is for making the model, where there is no trainer yet.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment
from g2po_trl.environment import Observation, StepResult
from g2po_trl.generation import Reply
from g2po_trl.rollout import ChatEncoder, run_episodes
from g2po_trl.trajectory import Trajectory


class _LocalPool:
    """Environments of this process, behind the part of the pool's interface that a rollout uses."""

    def __init__(self, manifest: Manifest, size: int):
        self.environments = [tiny_environment(manifest) for _ in range(size)]

    def reset(self, tasks: Sequence[dict[str, Any]], groups: Sequence[int]) -> list[Observation]:
        return [environment.reset(**task) for environment, task in zip(self.environments, tasks)]

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult]:
        return {slot: self.environments[slot].step(action) for slot, action in actions.items()}


def play(
    model,
    tokenizer,
    manifest: Manifest,
    rows: Sequence[dict[str, Any]],
    temperature: float = 1.0,
    max_turns: int = 15,
    seed: int = 0,
    batch_size: int = 48,
    max_completion_length: int = 24,
) -> list[Trajectory]:
    """One episode of each row's game."""
    torch.manual_seed(seed)
    model.eval()

    @torch.no_grad()
    def generate(prompts: list[list[int]]) -> list[Reply]:
        replies: list[Reply] = []
        for i in range(0, len(prompts), batch_size):
            batch = tokenizer.pad({"input_ids": prompts[i : i + batch_size]}, return_tensors="pt")
            ids = model.generate(
                **batch,
                max_new_tokens=max_completion_length,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
            )
            for reply in ids[:, batch["input_ids"].shape[1] :].tolist():
                complete = tokenizer.eos_token_id in reply
                end = reply.index(tokenizer.eos_token_id) + 1 if complete else len(reply)
                replies.append(Reply(reply[:end], complete=complete))
        return replies

    trajectories, _ = run_episodes(
        _LocalPool(manifest, len(rows)),
        generate,
        ChatEncoder(tokenizer),
        ALFWORLD_COMPACT_PROMPT,
        rows,
        [row["task_id"] for row in rows],
        range(len(rows)),
        max_turns,
        HISTORY_LENGTH,
        None,
    )
    return trajectories


def summarize(trajectories: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Success (also by task type), mean turns, share of well-formed and of admissible replies."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    by_type = defaultdict(list)
    for trajectory, row in zip(trajectories, rows):
        by_type[row["task_type"]].append(trajectory.success)
    return {
        "episodes": len(trajectories),
        "success": round(sum(t.success for t in trajectories) / len(trajectories), 3),
        "turns": round(len(steps) / len(trajectories), 1),
        "well_formed": round(sum(step.valid for step in steps) / len(steps), 3),
        "admissible": round(sum(s.valid and s.action in (s.admissible_actions or ()) for s in steps) / len(steps), 3),
        "reply_tokens": round(sum(len(step.completion_ids) for step in steps) / len(steps), 1),
        "prompt_tokens": round(sum(len(step.prompt_ids) for step in steps) / len(steps), 1),
        "by_type": {name: round(sum(won) / len(won), 2) for name, won in sorted(by_type.items())},
    }


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m g2po_envs.alfworld.tiny_evaluation", description=__doc__)
    parser.add_argument("model", help="folder of a model and its tokenizer")
    parser.add_argument("--games", type=Path, required=True, help="folder of held-out games")
    parser.add_argument("--limit", type=int, help="only this many games")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--max_turns", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    manifest = Manifest.scan(args.games)
    rows = manifest.rows()[: args.limit]
    for temperature in args.temperature:
        played = play(model, tokenizer, manifest, rows, temperature, args.max_turns, args.seed)
        print(json.dumps({"temperature": temperature, **summarize(played, rows)}), flush=True)


if __name__ == "__main__":
    main()
