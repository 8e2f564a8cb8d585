"""What limits a model in ALFWorld, copying or planning? Its success as it is, and with one of the two made perfect.

    python -m benchmarks.learning.oracles --output benchmarks/results/oracles [--model FOLDER] [--games 192]

*as it is*: the model's completions are played. *perfect copying*: one of the admissible actions, drawn by the model's
probabilities of their completions, whatever else it would write. *perfect planning*: the expert's action, in place of
each action of the model that is admissible; the expert has seen the whole room before, so it need not search, either.
The games are the default recipe's held-out ones.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import facts, write_results
from benchmarks.credit.language_policy import completion_log_probs
from g2po_envs.alfworld.demonstrations import Expert, Goal, House
from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.games import generate_games
from g2po_envs.alfworld.make_tiny_model import COURSE
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment, tiny_model_path
from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.tiny.training import COMPLETION
from g2po_trl.environments.contract import Observation

MODES = ("as it is", "perfect copying", "perfect planning")
MAX_TURNS = 15


@dataclass
class Player:
    """A model with its tokenizer, sampling at a temperature."""

    model: torch.nn.Module
    tokenizer: Any
    temperature: float
    rng: np.random.Generator

    @torch.inference_mode()
    def write(self, prompts: Sequence[str]) -> list[str]:
        """The action that each completion names; "" where the format is wrong."""
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
        options = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}
        written = self.model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [COURSE.template.read(text, "").action or "" for text in texts]

    def choose(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[str]:
        """One of the actions of each prompt, by the probability of its completion."""
        encode = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        completions = [[encode(COMPLETION.format(action=action)) for action in some] for some in actions]
        rows = [encode(prompt) + completion for prompt, some in zip(prompts, completions) for completion in some]
        lengths = [len(completion) for some in completions for completion in some]
        scores = completion_log_probs(self.model, [np.array(row) for row in rows], lengths, [self.temperature])[0]
        chosen = []
        for some, of_prompt in zip(actions, np.split(scores, np.cumsum([len(some) for some in actions])[:-1])):
            weights = np.exp(of_prompt - of_prompt.max())
            chosen.append(some[self.rng.choice(len(some), p=weights / weights.sum())])
        return chosen


@dataclass
class Episode:
    """A game that is played, and what an expert knows of it."""

    environment: AlfworldEnvironment
    row: dict[str, Any]
    history: list[tuple[str, str]] = field(default_factory=list)
    success: bool = False

    def __post_init__(self):
        self.house = House.scout(self.environment, self.row)
        self.now: Observation = self.environment.reset(**self.row)
        self.task = self.now.task
        self.expert = Expert(Goal.from_task(self.task), random.Random(0))

    def shown(self, turn: int) -> Demonstration:
        past = self.history[-HISTORY_LENGTH:]
        return Demonstration(self.task, self.now.text, list(self.now.admissible_actions), past, turn, "")

    def step(self, action: str) -> None:
        result = self.environment.step(action)
        if action in self.now.admissible_actions:
            self.house.apply(action)
        self.history.append((self.now.text, action))
        self.now, self.success = result.observation, bool(result.info["success"])


def play(player: Player, games: Manifest, rows: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Success by task type in percent, and the inadmissible actions by their first word in percent of all."""
    episodes = [Episode(tiny_environment(games), row) for row in rows]
    tried, failed = 0, Counter()
    for turn in range(MAX_TURNS):
        playing = [episode for episode in episodes if not episode.success]
        if not playing:
            break
        shown = [episode.shown(turn) for episode in playing]
        prompts = [COURSE.prompt(one, player.tokenizer) for one in shown]
        actions = player.choose(prompts, [one.actions for one in shown]) if mode == MODES[1] else player.write(prompts)
        for episode, action in zip(playing, actions):
            tried += 1
            if action not in episode.now.admissible_actions:
                failed[action.split(" ")[0]] += 1
            elif mode == MODES[2]:
                action = episode.expert.act(episode.house, episode.now.admissible_actions)
            episode.step(action)
    by_type = defaultdict(list)
    for episode in episodes:
        by_type[episode.row["task_type"]].append(episode.success)
    return {
        "success": 100 * float(np.mean([episode.success for episode in episodes])),
        "by_type": {kind: 100 * float(np.mean(won)) for kind, won in sorted(by_type.items())},
        "inadmissible": {word: 100 * count / tried for word, count in failed.most_common(5)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny_model_path())
    parser.add_argument("--games", type=int, default=192)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder of results.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path("~/.cache/g2po_trl/alfworld-tiny-0").expanduser() / f"held-out-{args.games}"
    games = generate_games(folder, "held-out", args.games, seed=0, size="tiny")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    found = facts("torch", "transformers", seeds={"games": 0, "sampling": args.seed}, results=[])
    for temperature in args.temperatures:
        for mode in MODES:
            torch.manual_seed(args.seed)
            player = Player(model, tokenizer, temperature, np.random.default_rng(args.seed))
            result = {"mode": mode, "temperature": temperature, **play(player, games, games.rows(), mode)}
            found["results"].append(result)
            wrong = ", ".join(f"{word} {share:.1f}" for word, share in result["inadmissible"].items())
            types = ", ".join(f"{kind.split('_')[1]} {won:.0f}" for kind, won in result["by_type"].items())
            print(
                f"{mode} at {temperature}: {result['success']:.1f} % ({types}); inadmissible, %: {wrong}", flush=True
            )
    write_results(args.output, found)


if __name__ == "__main__":
    main()
