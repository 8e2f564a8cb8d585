"""What a run wrote, as the page wants it: plain data, texts once, one iteration at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..credit.advantages import edge_advantage, episode_advantage, node_advantage
from ..credit.graph import StateGraph
from ..credit.prediction import LAMBDAS
from ..report.analysis import load_iteration, load_log
from ..trajectory import Trajectory

_CURVES = {  # the log's names -> the page's
    "episode/success_rate": "success",
    "episode/reward": "reward",
    "episode/turns": "turns",
    "episode/valid_action_ratio": "valid",
    "kl": "kl",
}
_SETTINGS = (
    "estimator_name gamma value_lambda step_advantage_weight invalid_action_penalty episode_statistics learning_rate "
    "beta num_generations max_turns temperature seed"
).split()
NUM_DISAGREEMENTS = 8


class Run:
    """A run's folder, read as far as it is looked at.

    Args:
        folder: the `output_dir` of a training run.
        tokenizer: decodes prompts; `None`: the one the run saved, if it did.

    Raises:
        ValueError: when the folder holds no trajectories.
    """

    def __init__(self, folder: str | Path, tokenizer=None):
        self.folder = Path(folder)
        numbers = {
            int(found[1])
            for path in self.folder.glob("trajectories/train-*.jsonl")
            if (found := re.match(r"train-(\d+)", path.name))
        }
        if not numbers:
            raise ValueError(
                f"{str(folder)!r} holds no trajectories/train-*.jsonl: pass the output_dir of a run with "
                "save_trajectories"
            )
        self.numbers = sorted(numbers)
        self._tokenizer, self._looked_for_tokenizer = tokenizer, tokenizer is not None
        described = self._read("run.json") or {}
        # Older runs have no part of their own for what the estimator was told.
        self.settings: dict[str, Any] = {**described.get("trainer", {}), **described.get("estimator", {})}
        self.steps_per_iteration: int | None = described.get("optimizer_steps_per_iteration")

    def overview(self) -> dict[str, Any]:
        """Curves, phase times, evaluations and settings: all that is shown before an iteration is chosen."""
        per_iteration = self.steps_per_iteration
        settings = {"estimator_name": self.settings.get("advantage_estimator"), **self.settings}
        curves = [
            {
                "n": number,
                **{ours: entry[theirs] for theirs, ours in _CURVES.items() if _is_number(entry.get(theirs))},
                "times": {
                    k.removeprefix("time/"): v for k, v in entry.items() if k.startswith("time/") and _is_number(v)
                },
            }
            for number, entry in self._log()
        ]
        return {
            "name": self.folder.resolve().name,
            "settings": {name: settings[name] for name in _SETTINGS if settings.get(name) is not None},
            "optimizer_steps_per_iteration": per_iteration,
            "curves": curves,
            "evaluations": self._evaluations(),
            "iterations": self.numbers,
        }

    def iteration(self, number: int, prompts: bool = True) -> dict[str, Any]:
        """One rollout: its groups with their graphs, advantages and steps.

        Args:
            prompts: with the text of each prompt, if the run's tokenizer is there to decode it.
        """
        texts = _Texts()
        groups = load_iteration(self.folder, number).groups
        for value_lambda in self._value_lambdas(number):
            shown = [self._group(group, texts, prompts, value_lambda) for group in groups]
            if all(group["adds_up"] for group in shown):
                break
        return {"n": number, "groups": shown, "texts": texts.all, "disagreements": _disagreements(shown)}

    def _value_lambdas(self, number: int) -> list[float]:
        """What the values of an iteration may have been made with: the first that adds up to what was trained.

        What a run chose is in its log, but not yet since the newest checkpoint, and as a mean where a line is about
        several iterations.
        """
        value_lambda = self.settings.get("value_lambda", 1.0)
        if value_lambda != "auto":
            return [value_lambda]
        logged = dict(self._log()).get(number, {}).get("graph/value_lambda", 1.0)
        return [logged, *LAMBDAS, logged]

    def _log(self) -> list[tuple[int, dict[str, Any]]]:
        """Number of an iteration and what was logged of it."""
        of_one = self.steps_per_iteration
        log = enumerate(load_log(self.folder), 1)
        return [(-(-entry["step"] // of_one) if of_one else number, entry) for number, entry in log]

    def _group(self, group: Sequence[Trajectory], texts: _Texts, prompts: bool, value_lambda: float) -> dict[str, Any]:
        args = self.settings
        graph = StateGraph.from_groups([group], args.get("gamma", 0.95), value_lambda)
        scale = args.get("scale_by_std", args.get("scale_rewards", "group") == "group")
        statistics = args.get("episode_statistics", "trajectory")
        penalty = args.get("invalid_action_penalty", 0.0)
        weight = args.get("step_advantage_weight", 1.0)
        aggregate = args.get("use_group_aggregation", True)
        episode = episode_advantage(graph, scale, penalty, statistics)
        node = node_advantage(graph, scale, penalty if statistics == "step" else 0.0, aggregate)
        edge = edge_advantage(graph, scale, aggregate)
        node, edge = node * args.get("use_node_advantage", True), edge * args.get("use_edge_advantage", True)
        parts = np.column_stack([episode, weight * node, weight * edge])
        steps = [step for trajectory in group for step in trajectory.steps]
        trajectories, at = [], 0
        for trajectory in group:
            mine = range(at, at + len(trajectory.steps))
            at += len(trajectory.steps)
            trajectories.append(
                {
                    "outcome": trajectory.outcome,
                    "reward": trajectory.reward,
                    "error": trajectory.error or trajectory.failure_reason,
                    "final": texts.number(trajectory.final_observation),
                    "steps": [
                        {
                            "o": texts.number(steps[i].observation),
                            "a": steps[i].action,
                            "r": texts.number(steps[i].reply),
                            "p": texts.number(self._prompt(steps[i])) if prompts else None,
                            "ok": bool(steps[i].valid),
                            "node": int(graph.node[i]),
                            "next": int(graph.next_node[i]),
                            "adv": [round(float(x), 4) for x in parts[i]],
                            "trained": None if steps[i].advantage is None else round(steps[i].advantage, 4),
                        }
                        for i in mine
                    ],
                }
            )
        nodes = [
            {"o": None, "v": round(float(value), 4), "visits": int(visits), "actions": None}
            for value, visits in zip(graph.node_values, graph.node_visits)
        ]
        for i, step in enumerate(steps):
            if graph.node[i] >= 0 and nodes[graph.node[i]]["o"] is None:
                nodes[graph.node[i]] |= {
                    "o": texts.number(step.observation),
                    "actions": texts.number("\n".join(step.admissible_actions or ())),
                }
        return {
            "task": group[0].task_id,
            "stored": any(step.advantage is not None for step in steps),
            "adds_up": all(
                abs(step.advantage - own) < 1e-3
                for step, own in zip(steps, parts.sum(axis=1))
                if step.advantage is not None
            ),
            "success": sum(t.success for t in group),
            "trajectories": trajectories,
            "nodes": nodes,
        }

    def _prompt(self, step) -> str | None:
        if step.prompt is not None or not step.prompt_ids:
            return step.prompt
        if not self._looked_for_tokenizer:
            self._looked_for_tokenizer = True
            self._tokenizer = _load_tokenizer(self.folder)
        return self._tokenizer.decode(step.prompt_ids) if self._tokenizer else None

    def _read(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _evaluations(self) -> list[dict[str, Any]]:
        path = self.folder / "evaluations.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


class _Texts:
    """Each text once: observations repeat themselves, that is the point of the graph."""

    def __init__(self):
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        if text is None:
            return None
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def _disagreements(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paper's case study: steps that local comparison underrates and A_EC lifts, the largest difference first."""
    found: dict[tuple, dict[str, Any]] = {}
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group["trajectories"]):
            for s, step in enumerate(trajectory["steps"]):
                _, local, gain = step["adv"]
                if local < 0 < gain:
                    edge = (g, step["node"], step["next"])
                    found.setdefault(edge, {"group": g, "trajectory": t, "step": s, "by": round(gain - local, 3)})
    return sorted(found.values(), key=lambda one: -one["by"])[:NUM_DISAGREEMENTS]


class _FastTokenizer:
    """Decodes as transformers does, which would take ten seconds to import."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _load_tokenizer(folder: Path):
    places = [folder, *sorted(folder.glob("checkpoint-*"))]
    place = next((p for p in places if (p / "tokenizer_config.json").is_file()), None)
    if place is None:
        return None
    if (place / "tokenizer.json").is_file():
        return _FastTokenizer(place / "tokenizer.json")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)
