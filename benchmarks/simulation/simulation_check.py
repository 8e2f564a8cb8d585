"""What the simulator predicts of the rollouts of `streaming.py`, beside what was measured."""

from __future__ import annotations

import os
import random
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.simulation.simulated import EngineCosts, PoolCosts, Recorded
from benchmarks.simulation.simulated_rank import LOOPS, Group, Rank, all_at_once

CHECKED = "up to these seconds a step, what, predicted, measured, relative error"


def slope(points: dict[str, float]) -> float:
    """Of the line through measured {number: seconds}, by least squares of relative errors."""
    n, seconds = (np.array(list(column), dtype=float) for column in (points, points.values()))
    rows = np.stack([np.ones(len(n)), n], axis=1) / seconds[:, None]
    return float(np.linalg.lstsq(rows, np.ones(len(n)), rcond=None)[0][1])


def check(measured: dict[str, Any], known: dict[str, Any], host: dict[str, float]) -> dict[str, Any]:
    """Predicted and measured steps a second of the rollouts of `streaming.py`.

    The engine's two costs, of a pass and of what is in it, are those that two of the measured rates give: of turns and
    of all prompts at once, without added seconds. How a prompt token compares with a sequence is as measured alone.

    Args:
        known: results with the tokens of prompts and completions, and the engine's times; of the same seeds.
    """
    settings, runs = measured["settings"], measured["raw"]
    lengths = known["tokens of prompt and reply, by repetition, episode, turn"][: settings["repetitions"]]
    steps = [sum(map(len, episodes)) for episodes in lengths]
    if any([run["steps"] for run in of["turns"]] != steps for of in runs.values()):
        raise ValueError("these are not the rollouts whose tokens are known: give both runs the same seeds")
    times = known["seconds of the engine"]
    prompt_token = slope(times["read"]) / times["prompt"]["tokens"] / slope(times["decode step"])
    base = EngineCosts(0.0, 0.0, max_sequences=256, prompt=host["built_prompt"], prompt_text=host["built_token"])
    pool = PoolCosts(settings["workers"], host["environment_step"], host["reset"], host["reset"], os.cpu_count())

    def groups(repetition: int, seconds: float) -> list[Group]:
        members = []
        for number, turns in enumerate(lengths[repetition]):
            draw = random.Random(number)
            prompts, completions = zip(*turns)
            waits = [seconds * draw.random() for _ in turns]
            members.append(Recorded(prompts, completions, waits, len(turns) < settings["turns"]))
        return [members[i : i + 8] for i in range(0, len(members), 8)]

    def played(costs: EngineCosts, loop: str, seconds: float) -> list[dict[str, float]]:
        rank = Rank(costs, pool, settings["turns"], loop)
        rank.play(groups(0, seconds))  # the pool measures; `streaming.py` does not count its first rollout, either
        return [rank.play(groups(repetition, seconds)) for repetition in range(len(lengths))]

    # Seconds a step are linear in both costs, where nothing else goes on while the engine computes.
    parts = [replace(base, step=1.0), replace(base, sequence=1.0, prompt_token=prompt_token)]
    fastest = min(runs, key=float)
    at_once = [median(all_at_once(groups(r, 0.0), c) / n for r, n in enumerate(steps)) for c in parts]
    in_turns = [median(run["computing"] / run["steps"] for run in played(c, "turns", 0.0)) for c in parts]
    beside = median((run["seconds"] - run["computing"]) / run["steps"] for run in played(parts[0], "turns", 0.0))
    wanted = [
        median(run["seconds"] / run["steps"] for run in runs[fastest][name]) for name in ("all at once", "turns")
    ]
    step, sequence = np.linalg.solve([at_once, in_turns], [wanted[0], wanted[1] - beside]).tolist()
    costs = replace(base, step=step, sequence=sequence, prompt_token=prompt_token * sequence)
    rows = []
    for seconds, of in runs.items():
        for loop in LOOPS:
            rates = [
                median(r["steps"] / r["seconds"] for r in rs) for rs in (played(costs, loop, float(seconds)), of[loop])
            ]
            rows.append([seconds, loop, *(round(rate, 2) for rate in rates), round(rates[0] / rates[1] - 1, 3)])
        ratios = [rows[-1][column] / rows[-2][column] for column in (2, 3)]
        rows.append([seconds, "streams by turns", *(round(r, 2) for r in ratios), round(ratios[0] / ratios[1] - 1, 3)])
    return {"engine": asdict(costs), "environments": asdict(pool), CHECKED: rows}
