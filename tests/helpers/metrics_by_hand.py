"""Every metric once more, in plain loops over what a run wrote and over the micro-batches of its losses.

Nothing here calls the code that computes metrics: trajectories are read as JSON, values and advantages follow the
paper's equations step by step, log-probabilities come from one unpadded forward pass a row.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import torch

# -- reading ----------------------------------------------------------------------------------------------------------


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


# -- episodes ---------------------------------------------------------------------------------------------------------


def is_admissible(step: dict) -> bool | None:
    if not step["admissible_actions"]:
        return None
    said = step["action"].lower().strip()
    listed = [one.lower() for one in step["admissible_actions"]]
    return step["valid"] and (said in listed or said.startswith("say ") and len(said) > 4)


def mean_of(values) -> float:
    values = [float(value) for value in values]
    return mean(values) if values else math.nan


def episode_metrics(trajectories: list[dict]) -> dict[str, float]:
    """Of a rollout or an evaluation, without prefix; nan where there is nothing to average."""
    finished = [t for t in trajectories if counts(t)]
    steps = [step for t in finished for step in t["steps"]]
    won = [t for t in finished if t["outcome"] == "success"]
    found = {
        "success_rate": mean_of(t["outcome"] == "success" for t in finished),
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
    names = {name for t in finished for name in t["info"] if name == "score" or name.startswith("score_")}
    return found | {name: mean_of(t["info"].get(name, 0) for t in finished) for name in names}


# -- graph and advantages ---------------------------------------------------------------------------------------------


def returns_of(group: list[dict], gamma: float) -> list[list[float]]:
    """gamma^(T-j+1) R of each step."""
    return [[gamma ** (len(t["steps"]) - place) * t["reward"] for place in range(len(t["steps"]))] for t in group]


def sweep(group: list[dict], gamma: float, value_lambda: float) -> tuple[dict[str, float], list[list[float]]]:
    """Values of states, and the returns whose means they are, swept until nothing moves."""
    returns = returns_of(group, gamma)
    while True:
        visits = defaultdict(list)
        for t, own in zip(group, returns):
            for step, value in zip(t["steps"], own):
                if counts(t):
                    visits[key_of(step)].append(value)
        values = {key: mean(of) for key, of in visits.items()}
        if value_lambda == 1:
            return values, returns
        moved = []
        for t in group:
            steps, after, swept = t["steps"], t["reward"], []
            for place in reversed(range(len(steps))):
                last = place == len(steps) - 1
                onward = (
                    after if last else (1 - value_lambda) * values[key_of(steps[place + 1])] + value_lambda * after
                )
                after = gamma * onward
                swept.append(after)
            moved.append(swept[::-1] if counts(t) else returns[group.index(t)])
        distance = max((abs(a - b) for old, new in zip(returns, moved) for a, b in zip(old, new)), default=0)
        returns = moved
        if distance < 1e-12:
            return values, returns


def standardised(values: list[float], scale: bool = True) -> list[float]:
    spread = stdev(values) if len(values) > 1 else 0.0
    if spread < 1e-9:
        return [0.0] * len(values)
    return [(value - mean(values)) / (spread + 1e-6 if scale else 1) for value in values]


def parts_of(group: list[dict], gamma: float, value_lambda: float, penalty: float) -> list[dict]:
    """A_EP without its penalty, A_NC and A_EC of each counted step, and where it is."""
    values, _ = sweep(group, gamma, value_lambda)
    whole = [n for n, t in enumerate(group) if counts(t)]
    of_episode = dict(zip(whole, standardised([group[n]["reward"] for n in whole])))
    rows = []
    for number, t in enumerate(group):
        for place, step in enumerate(t["steps"] if counts(t) else ()):
            last = place == len(t["steps"]) - 1
            after = t["reward"] if last else values[key_of(t["steps"][place + 1])]
            gain = after - values[key_of(step)]
            row = {"trajectory": number, "place": place, "key": key_of(step), "after": after, "gain": gain}
            rows.append(row | {"episode": of_episode.get(number), "penalty": penalty * (not step["valid"])})
    at = defaultdict(list)
    for row in rows:
        at[row["key"]].append(row)
    for same in at.values():
        for row, value in zip(same, standardised([row["after"] for row in same])):
            row["node"] = value
    for row, value in zip(rows, standardised([row["gain"] for row in rows])):
        row["edge"] = value
    return rows


def advantage_metrics(rollout: Rollout, gamma: float, value_lambda: float, penalty: float) -> dict[str, float]:
    """Of G2PO; also compares what was trained with what the equations say."""
    rows = [(group, row) for group in rollout.groups for row in parts_of(group, gamma, value_lambda, penalty)]
    for group, row in rows:
        whole = (row["episode"] or 0.0) - row["penalty"] + row["node"] + row["edge"]
        trained = group[row["trajectory"]]["steps"][row["place"]]["advantage"]
        assert math.isclose(trained, whole, abs_tol=1e-5), (trained, row)
    whole = [row for _, row in rows if row["episode"] is not None]
    return {
        "advantage/abs_mean": mean_of(abs(step["advantage"]) for step in rollout.steps),
        "advantage/episode_abs_mean": mean_of(abs(row["episode"] - row["penalty"]) for row in whole),
        "advantage/node_abs_mean": mean_of(abs(row["node"]) for _, row in rows),
        "advantage/edge_abs_mean": mean_of(abs(row["edge"]) for _, row in rows),
    }


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


# -- what a rollout cost ----------------------------------------------------------------------------------------------


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


def conversation_metrics(rollout: Rollout) -> dict[str, float]:
    later, continued = 0, 0
    for trajectory in rollout.all:
        written = []
        for step in trajectory["steps"]:
            prompt = step["prompt_ids"]
            later += bool(written)
            continued += any(prompt[: len(ids)] == ids and len(prompt) > len(ids) for ids in written)
            written.append(prompt + step["completion_ids"])
    return {"rollout/continued_prompt_fraction": continued / later}


def age_metrics(rollout: Rollout, number: int) -> dict[str, float]:
    ages = [number - step["policy_version"] for t in rollout.kept for step in t["steps"]]
    return {"rollout/mean_age": mean(ages), "rollout/max_age": max(ages)}


def active_fraction(parts: list[list[dict]]) -> float:
    """Of rollouts in parts, each a list of trajectories that were played together."""
    played = [[t for t in part if not (t["error"] or "").startswith("excluded: ")] for part in parts]
    lengths = [[len(t["steps"]) for t in part] for part in played]
    return sum(map(sum, lengths)) / sum(max(part) * len(part) for part in lengths if part)


# -- the update -------------------------------------------------------------------------------------------------------


def update_metrics(rollout: Rollout, beta: float, mask_truncated: bool, passes: list[dict]) -> dict[str, float]:
    """`passes`: the forward passes of one pass through the rollout, their `positions`, and how many of those hold a
    token, `tokens`."""
    kept = [
        step
        for step in rollout.steps
        if not (mask_truncated and step["completion_truncated"]) and (beta or step["advantage"])
    ]
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
    """DAPO's, over all tokens of `rows`, which have `logps`, `entropy`, `old`, `reference`, `advantage` and `weight`.

    Args:
        num_tokens: of all step samples, those that were left out included.
    """
    ratios = [torch.exp(row["logps"] - row["old"]) for row in rows]
    low = [(ratio < 1 - clip) & (row["advantage"] < 0) for ratio, row in zip(ratios, rows)]
    high = [(ratio > 1 + clip) & (row["advantage"] > 0) for ratio, row in zip(ratios, rows)]
    gains = [
        row["weight"] * torch.minimum(ratio * row["advantage"], ratio.clamp(1 - clip, 1 + clip) * row["advantage"])
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


def importance_weights(row: dict, mode: str, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(C,) or (1,) ratios of the policy that is trained to the one that acted, as they are and bounded."""
    differences = row["old"] - row["sampled"]
    ratio = (differences if mode.startswith("token") else differences.sum()[None]).exp()
    return ratio, ratio.clamp(max=bound) if mode.endswith("truncate") else ratio * (ratio <= bound)


def sampling_metrics(rows: list[dict], mode: str, bound: float) -> dict[str, float]:
    """Of rows with the acting policy's log-probabilities `sampled`, under the policy of the update, `old`."""
    differences = torch.cat([row["old"] - row["sampled"] for row in rows]).abs()
    ratios, bounded = map(torch.cat, zip(*(importance_weights(row, mode, bound) for row in rows)))
    return {
        "sampling/sampling_logp_difference/mean": differences.mean().item(),
        "sampling/sampling_logp_difference/max": differences.max().item(),
        "sampling/importance_sampling_ratio/mean": bounded.mean().item(),
        "sampling/importance_sampling_ratio/min": bounded.min().item(),
        "sampling/importance_sampling_ratio/max": bounded.max().item(),
        "sampling/importance_sampling_ratio/clipped_fraction": (ratios > bound * 1.0001).double().mean().item(),
        "sampling/effective_sample_size": (ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())).item(),
    }
