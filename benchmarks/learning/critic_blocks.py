"""What does a critic of a model's first blocks cost PPO in success? The default game with it and with the whole one.

    python -m benchmarks.learning.critic_blocks --blocks 1 --seeds 100 101 102 103

A run is a run of `learning.comparison`: the recipe as a user runs it, with its seed and 40 iterations, on one thread;
then 576 held-out games are played, `--plays` times at temperature 1 and once at 0.4. Runs of the whole critic that the
comparison's stage *methods* has (seeds 100 to 103) are not repeated: with seed 100 the first three iterations are
equal in all stored digits. What is complete is not run again, and what is interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import RESULTS, ROOT, facts, write_results
from benchmarks.learning.comparison_report import held_out, training
from benchmarks.learning.comparison_runs import VERSIONS, Runner
from benchmarks.learning.comparison_stages import Job, alfworld
from benchmarks.learning.comparison_statistics import paired_interval
from benchmarks.learning.recipe_runs import say
from g2po_envs.alfworld.tiny import tiny_model_path

STAGE, STORED = "critic", RESULTS / "comparison/runs/methods"
MEASURES = {"held-out 1.0": held_out, "held-out 0.4": lambda run: held_out(run, "0.4"), "training": training}


def save_first_blocks(model: Path, blocks: int, folder: Path) -> None:
    """Write a model of the first blocks of another one."""
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers, config.layer_types = blocks, config.layer_types[:blocks]
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(folder)


def job(seed: int, critic: Path | None, plays: int) -> Job:
    """Return a run; `critic`: folder of a truncated model, in the clone; `plays`: of the panel at temperature 1."""
    flags = () if critic is None else ("--critic_model_name_or_path", str(critic.relative_to(ROOT)))
    arm = f"ppo {critic.name}" if critic else "ppo"
    return replace(alfworld(STAGE, "ppo", seed, *flags), arm=arm, panels=((1.0, plays), (0.4, 1)))


def kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the results file has of a run."""
    plays = {temperature: of["success_rate"] for temperature, of in run["held_out"][-1].items() if of}
    found = {name: run[name] for name in ("command", "commit", "cpu_seconds", "attempts")}
    return found | {"held_out": plays, **{name: run["training"][name] for name in ("success", "kl", "time_critic")}}


def seconds(run: Mapping[str, Any]) -> dict[str, float]:
    """Return medians over iterations; the ratio to the policy's update is the same beside other load."""
    critic, update = run["training"]["time_critic"], run["training"]["time_update"]
    ratios = [one / other for one, other in zip(critic, update)]
    return {"seconds": statistics.median(critic), "by the update's": round(statistics.median(ratios), 4)}


def compared(arms: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return success by seed in percent and paired differences in points, with Student's 95 % interval."""
    seeds = sorted(set.intersection(*map(set, arms.values())))
    found: dict[str, Any] = {"seeds": seeds}
    for name, number in MEASURES.items():
        by_arm = {arm: [100 * number(of[seed]) for seed in seeds] for arm, of in arms.items()}
        whole, truncated = by_arm.values()
        differences = np.subtract(truncated, whole)
        found[name] = {**by_arm, "mean": float(np.mean(differences)), "interval": paired_interval(list(differences))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1, help="blocks of the truncated critic; the model has three")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(100, 104)])
    parser.add_argument("--plays", type=int, default=2, help="of the held-out games at temperature 1")
    parser.add_argument("--minutes", type=float, default=600, help="start no run after so many minutes")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/critic_blocks", help="folders of runs, in the clone")
    parser.add_argument("--output", type=Path, default=RESULTS / "critic_blocks")
    args = parser.parse_args()
    begun, work = time.time(), args.work.absolute()
    critic = work / f"first-{args.blocks}-of-3"
    save_first_blocks(tiny_model_path(), args.blocks, critic)
    runner = Runner(work, work)
    runner.stop_on_signals()
    arms: dict[str, dict[int, Any]] = {"whole": {}, critic.name: {}}
    for seed in args.seeds:
        for name, of in (("whole", job(seed, None, args.plays)), (critic.name, job(seed, critic, args.plays))):
            stored = STORED / f"ppo-seed{seed}.json"
            path = stored if name == "whole" and stored.exists() else runner.file_of(of)
            if not path.exists() and time.time() - begun < 60 * args.minutes and not runner.stopping.is_set():
                say(f"{name}, seed {seed}")
                runner.play(of)
            if path.exists():
                arms[name][seed] = json.loads(path.read_text())
    content = facts(*VERSIONS, **compared(arms))
    content["critic"] = {name: {seed: seconds(run) for seed, run in of.items()} for name, of in arms.items()}
    content["runs"] = {name: {seed: kept(run) for seed, run in of.items()} for name, of in arms.items()}
    write_results(args.output, content)
    for name in MEASURES:
        say(f"{name}: {content[name]}")


if __name__ == "__main__":
    main()
