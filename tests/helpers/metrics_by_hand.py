"""Every metric once more, in plain loops over what a run wrote and over the micro-batches of its losses.

Nothing here calls the code that computes metrics: trajectories are read as JSON, and log-probabilities come from one
unpadded forward pass a row.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


class Rollout:
    """An iteration's files. `kept`: groups of trajectories that were trained on; `replaced`: others, in a row."""

    def __init__(self, folder: Path, number: int, group_size: int):
        kept = lines_of(folder / "trajectories" / f"train-{number:06d}.jsonl")
        path = folder / "trajectories" / f"replaced-{number:06d}.jsonl"
        self.replaced = lines_of(path) if path.is_file() else []
        self.groups = [kept[i : i + group_size] for i in range(0, len(kept), group_size)]
        self.kept, self.all = kept, kept + self.replaced
        self.counted = [t for t in kept if counts(t)]
        self.steps = [step for t in self.counted for step in t["steps"]]  # those that are trained on


def counts(trajectory: dict) -> bool:
    return trajectory["outcome"] not in ("error", "lost")


def key_of(step: dict) -> str:
    return step["observation"] if step["state_key"] is None else step["state_key"]


def is_admissible(step: dict) -> bool | None:
    if not step["admissible_actions"]:
        return None
    said = step["action"].lower().strip()
    listed = [one.lower() for one in step["admissible_actions"]]
    return step["valid"] and (said in listed or said.startswith("say ") and len(said) > 4)


def mean_of(values) -> float:
    values = [float(value) for value in values]
    return mean(values) if values else math.nan


def error_by_task(finished: list[dict]) -> float:
    """Over tasks, and at least that of a share of one success and one failure more; nan of fewer than five tasks."""
    tasks = defaultdict(list)
    for t in finished:
        tasks[t["task_id"]].append(t["outcome"] == "success")
    if len(tasks) < 5:
        return math.nan
    share = (sum(map(sum, tasks.values())) + 1) / (len(finished) + 2)
    by_chance = math.sqrt(share * (1 - share) / (len(finished) + 2))
    rate = sum(map(sum, tasks.values())) / len(finished)
    squares = sum((sum(won) - rate * len(won)) ** 2 for won in tasks.values())
    return max(by_chance, math.sqrt(len(tasks) / (len(tasks) - 1) * squares) / len(finished))


def episode_metrics(trajectories: list[dict]) -> dict[str, float]:
    """Of a rollout or an evaluation, without prefix; nan where there is nothing to average."""
    finished = [t for t in trajectories if counts(t)]
    steps = [step for t in finished for step in t["steps"]]
    won = [t for t in finished if t["outcome"] == "success"]
    found = {
        "success_rate": mean_of(t["outcome"] == "success" for t in finished),
        "success_rate_error": error_by_task(finished),
        "reward": mean_of(sum(s["reward"] for s in t["steps"]) for t in finished),
        "turns": mean_of(len(t["steps"]) for t in finished),
        "turns_to_success": mean_of(len(t["steps"]) for t in won),
        "valid_action_ratio": mean_of(step["completion"][:1].isalpha() for step in steps),
        "truncated_rate": mean_of(t["outcome"] == "truncated" for t in finished),
        "failure_reason_rate": mean_of(bool(t["failure_reason"]) for t in finished),
        "error_rate": mean_of(t["outcome"] == "error" for t in trajectories),
        "lost_rate": mean_of(t["outcome"] == "lost" for t in trajectories),
        "episodes": len(trajectories),
    }
    listed = [is_admissible(step) for step in steps if is_admissible(step) is not None]
    if listed:
        found["admissible_action_ratio"] = mean_of(listed)
    for t in finished:
        if t["failure_reason"]:
            name = "failures/" + t["failure_reason"].split(":")[0].replace(" ", "_")
            found[name] = found.get(name, 0) + 1 / len(finished)
    for name in {t["environment"] for t in trajectories} - {None}:
        own = [t for t in finished if t["environment"] == name]
        found[f"success_rate/{name}"] = mean_of(t["outcome"] == "success" for t in own)
        found[f"reward/{name}"] = mean_of(t["reward"] for t in own)
        found[f"turns/{name}"] = mean_of(len(t["steps"]) for t in own)
    names = {name for t in finished for name in t["info"] if name == "score" or name.startswith("score_")}
    return found | {name: mean_of(t["info"].get(name, 0) for t in finished) for name in names}


def call_metrics(trajectories: list[dict], tools: set[str]) -> dict[str, float]:
    """Of episodes whose prompts offer these tools in prose, by the texts of the completions."""
    texts = [step["completion"] for t in trajectories if counts(t) for step in t["steps"]]
    calls, readable = [], []
    for text in texts:
        if "<tool_call>" not in text:
            continue
        calls.append(text)
        try:
            inside = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
            readable.append({json.loads(part)["name"] for part in inside})
        except ValueError:
            continue
    return {
        "tool_call_ratio": len(calls) / len(texts),
        "readable_call_ratio": len(readable) / len(calls),
        "known_call_ratio": mean_of(names <= tools for names in readable),
    }


def returns_of(group: list[dict], gamma: float) -> list[list[float]]:
    return [[gamma ** (len(t["steps"]) - place) * t["reward"] for place in range(len(t["steps"]))] for t in group]


def graph_metrics(rollout: Rollout, gamma: float) -> dict[str, float]:
    visits = []
    for group in rollout.groups:
        at = defaultdict(list)
        for t, own in zip(group, returns_of(group, gamma)):
            for step, value in zip(t["steps"], own):
                if counts(t):
                    at[key_of(step)].append(value)
        visits += at.values()
    distances = [(value - mean(of)) ** 2 for of in visits for value in of]
    return {
        "graph/nodes": len(visits),
        "graph/mean_group_size": mean_of(len(of) for of in visits),
        "graph/singleton_step_fraction": sum(len(of) == 1 for of in visits) / len(distances),
        "graph/value_std_within_node": math.sqrt(mean(distances)),
    }


def cost_metrics(rollout: Rollout) -> dict[str, float]:
    steps = [step for t in rollout.all for step in t["steps"]]
    prompts, completions = (sum(len(step[name]) for step in steps) for name in ("prompt_ids", "completion_ids"))
    return {
        "rollout/episodes": len(rollout.all),
        "rollout/steps": len(steps),
        "rollout/prompt_tokens": prompts,
        "rollout/completion_tokens": completions,
        "rollout/mean_prompt_tokens": prompts / len(steps),
        "rollout/mean_completion_tokens": completions / len(steps),
        "rollout/truncated_prompts": sum(step["prompt_truncated"] for step in steps),
        "rollout/truncated_completions": sum(step["completion_truncated"] for step in steps),
    }


def update_metrics(rollout: Rollout, beta: float, passes: list[dict]) -> dict[str, float]:
    """`passes`: the forward passes of one pass through the rollout, their `positions`, and how many of those hold a
    token, `tokens`."""
    kept = [step for step in rollout.steps if beta or step["advantage"]]
    needed = sum(len(step["prompt_ids"]) + len(step["completion_ids"]) for step in kept)
    tokens, positions = sum(one["tokens"] for one in passes), sum(one["positions"] for one in passes)
    return {
        "update/step_samples": len(rollout.steps),
        "update/left_out_fraction": 1 - len(kept) / len(rollout.steps),
        "update/micro_batches": len(passes),
        "update/forwarded_tokens": positions,
        "update/padding_fraction": 1 - tokens / positions,
        "update/repeated_token_fraction": 1 - tokens / needed,
        "update/token_imbalance": 1.0,  # one process
        "rollout/token_imbalance": 1.0,
    }


def score(model, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(C,) log-probabilities and entropies of a row's completion, by a forward pass of this row alone."""
    prompt, completion = row["prompt"], row["completion"]
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].double()
    logs = logits.log_softmax(-1)
    return logs.gather(1, completion[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def loss_metrics(rows: list[dict], beta: float, clip: float, num_tokens: int) -> dict[str, float]:
    """DAPO's, over all tokens of `rows`, which have `logps`, `entropy`, `old`, `reference` and `advantage`.

    Args:
        num_tokens: of all step samples, those that were left out included.
    """
    ratios = [torch.exp(row["logps"] - row["old"]) for row in rows]
    low = [(ratio < 1 - clip) & (row["advantage"] < 0) for ratio, row in zip(ratios, rows)]
    high = [(ratio > 1 + clip) & (row["advantage"] > 0) for ratio, row in zip(ratios, rows)]
    gains = [
        torch.minimum(ratio * row["advantage"], ratio.clamp(1 - clip, 1 + clip) * row["advantage"])
        for ratio, row in zip(ratios, rows)
    ]
    of_tokens = lambda values: torch.cat([value.double() for value in values]).mean().item()  # noqa: E731
    found = {
        "loss": -torch.cat(gains).sum().item() / num_tokens,
        "entropy": of_tokens([row["entropy"] for row in rows]),
        "clip_ratio/low_mean": of_tokens(low),
        "clip_ratio/high_mean": of_tokens(high),
        "clip_ratio/region_mean": of_tokens([a | b for a, b in zip(low, high)]),
        "clip_ratio/low_min": min(one.double().mean().item() for one in low),
        "clip_ratio/high_max": max(one.double().mean().item() for one in high),
    }
    if beta:
        distances = [row["reference"] - row["logps"] for row in rows]
        terms = [(torch.exp(d) - d - 1) * ratio for d, ratio in zip(distances, ratios)]
        found["kl"] = of_tokens(terms)
        found["loss"] += beta * torch.cat(terms).sum().item() / num_tokens
    return found
