"""Runs of the training recipe by window and by conversation, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import facts, write_results
from benchmarks.learning.recipe_runs import RecipeRunner, code, say

TRAIN = ("recipes/train_alfworld.py", "--use_vllm", "true", "--max_prompt_length", "2048", "--num_eval_games", "96")
PARTS = ("g2po_trl", "envs", "recipes")
# For the CPU build of vLLM, which the runs use because `generate` has no prefix cache: each turn is read anew.
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CURVES = (
    "episode/success_rate",
    "episode/turns",
    "episode/admissible_action_ratio",
    "rollout/steps",
    "rollout/prompt_tokens",
    "rollout/completion_tokens",
    "rollout/truncated_prompts",
    "rollout/continued_prompt_fraction",
    "rollout/prefix_cache_hit_fraction",
    "update/optimizer_steps",
    "update/micro_batches",
    "update/forwarded_tokens",
    "update/repeated_token_fraction",
    "update/padding_fraction",
    "kl",
    "entropy",
    "grad_norm",
    "time/rollout",
    "time/generation",
    "time/prompts",
    "time/environment",
    "time/logps",
    "time/update",
)


def command(history: str, seed: int, steps: int, start: str = "START", flags: Sequence[str] = ()) -> list[str]:
    """Return the recipe and its flags; `start` is the taught model's folder."""
    words = ["--history", history, "--seed", str(seed), "--max_steps", str(steps), "--model_name_or_path", start]
    # The panel before training is the same for all seeds.
    words += ["--num_environment_workers", "1", *(["--eval_before", "false"] if seed else [])]
    return [*TRAIN, *words, *flags]


def train(
    runner: RecipeRunner, work: Path, results: Path, history: str, seed: int, steps: int, flags: Sequence[str]
) -> bool:
    """Play or continue a run, and write its file. False: it was stopped before its end.

    Raises:
        RuntimeError: if the recipe failed; names its log.
    """
    name = f"{history}-seed{seed}"
    path, (commit, _) = results / f"{name}.json", code(PARTS)
    words = command(history, seed, steps, flags=flags)
    if path.is_file() and (found := json.loads(path.read_text()))["complete"] and found["recipe"] == words:
        return True
    say(name)
    start = str(work / f"start-{history}")
    attempts = runner.run(work / name, command(history, seed, steps, start, flags), commit)
    keep(work, results, history, seed, complete=attempts is not None, recipe=words, attempts=attempts)
    return attempts is not None


def keep(work: Path, results: Path, history: str, seed: int, **about: Any) -> None:
    """Write the file of a run, complete or under way."""
    name = f"{history}-seed{seed}"
    found = {"history": history, "seed": seed, **about, **facts("torch", "trl"), **collected(work / name)}
    write_results(results, found, f"{name}.json")


def keep_unfinished(work: Path, results: Path, histories: Sequence[str], seeds: Sequence[int]) -> None:
    """Write the files of runs that are not complete, as far as they have come."""
    for history in histories:
        for seed in seeds:
            path = results / f"{history}-seed{seed}.json"
            complete = path.is_file() and json.loads(path.read_text())["complete"]
            if (work / f"{history}-seed{seed}" / "run.json").is_file() and not complete:
                keep(work, results, history, seed, complete=False, recipe=command(history, seed, 40))


def collected(folder: Path) -> dict[str, Any]:
    """Return panels and curves of a run, complete or under way."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    history = json.loads(states[-1].read_text())["log_history"] if states else []
    iterations = [entry for entry in history if "rollout/steps" in entry]
    lines = (folder / "evaluations.jsonl").read_text().splitlines() if (folder / "evaluations.jsonl").exists() else []
    curves = {name: [rounded(entry.get(name)) for entry in iterations] for name in CURVES}
    return {
        "panels": [json.loads(line) for line in lines],
        "curves": {name: curve for name, curve in curves.items() if any(value is not None for value in curve)},
    }


def rounded(value: float | None) -> float | None:
    """Return five significant digits; counts below a billion stay whole."""
    return None if value is None else int(value) if value == int(value) else float(f"{value:.5g}")
