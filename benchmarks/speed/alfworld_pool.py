"""ALFWorld in the pool: time and memory of many episodes of official games, beside the stock engine.

    python -m benchmarks.speed.alfworld_pool --games $ALFWORLD_DATA/json_2.1.1/train --output benchmarks/results/pool

128 episodes over 16 games, 8 each, played by chance for 20 turns in as many workers as there are cores. Then the stock
engine (`textworld.envs.PddlEnv` with ALFWorld's wrappers, as `alfworld` itself uses it) plays the same actions of some
of these episodes in one process. Then 2,000 resets over the same games, to see whether memory grows. Memory is the
proportional share (PSS) of all workers. Prints and writes the command, the machine and every value.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common import facts, write_results
from g2po_envs.alfworld import AlfworldEnvironment, Manifest
from g2po_trl import EnvironmentPool

# Reads games and actions from stdin; nothing of ours is imported.
STOCK = """
import json, sys, time
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
env = AlfredInfos(AlfredDemangler(textworld.envs.PddlEnv(infos)))
resets, steps, count, texts = 0.0, 0.0, 0, []
for path, actions in json.load(sys.stdin):
    started = time.perf_counter()
    env.load(path)
    state = env.reset()
    resets += time.perf_counter() - started
    started = time.perf_counter()
    for action in actions:
        state, score, done = env.step(action)
        texts.append(state["feedback"].strip())
    steps += time.perf_counter() - started
    count += len(actions)
print("RESULT " + json.dumps({"reset_seconds": resets, "step_seconds": steps, "steps": count, "texts": texts}))
"""


def memory(pool: EnvironmentPool) -> float:
    """Megabytes, proportional share, of all workers."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pool.worker_pids) / 2**20


def play(pool: EnvironmentPool, tasks: list[dict], turns: int, rng: random.Random) -> dict:
    """Random play of all episodes at once; actions and texts of each are kept."""
    started = time.perf_counter()
    observations = pool.reset(tasks, [i // 8 for i in range(len(tasks))])
    reset_seconds = time.perf_counter() - started
    live, actions, texts = dict(enumerate(observations)), [[] for _ in tasks], [[] for _ in tasks]
    started = time.perf_counter()
    for _ in range(turns):
        chosen = {slot: rng.choice(o.admissible_actions) for slot, o in live.items()}
        if not chosen:
            break
        for slot, result in pool.step(chosen).items():
            actions[slot].append(chosen[slot])
            texts[slot].append(result.observation.text)
            live[slot] = result.observation
            if result.terminated:
                del live[slot]
    steps = sum(map(len, actions))
    seconds = time.perf_counter() - started
    return {
        "reset_seconds": reset_seconds,
        "step_seconds": seconds,
        "steps": steps,
        "actions": actions,
        "texts": texts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=Path, required=True, help="folder of official games")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num_games", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--stock_episodes", type=int, default=8, help="of different games")
    parser.add_argument("--resets", type=int, default=2000)
    args = parser.parse_args()
    rng = random.Random(0)
    manifest = Manifest.scan(args.games)
    ids = rng.sample(sorted(manifest.games), args.num_games)
    tasks = [{"task_id": ids[i * args.num_games // args.episodes]} for i in range(args.episodes)]
    result = facts("textworld", "alfworld")
    print(json.dumps(result["machine"]))
    with EnvironmentPool(partial(AlfworldEnvironment, manifest)) as pool:
        runs = [play(pool, tasks, args.turns, random.Random(seed)) for seed in (1, 2)]
        first, again = runs
        result["workers"] = pool.num_workers
        result["memory_mb"] = memory(pool)
        for name, run in (("first", first), ("again", again)):
            rate = run["steps"] / run["step_seconds"]
            result[name] = {k: v for k, v in run.items() if k not in ("actions", "texts")} | {"steps_per_second": rate}
            print(
                f"{name}: {args.episodes} episodes over {args.num_games} games reset in {run['reset_seconds']:.1f} s, "
                f"{run['steps']} steps in {run['step_seconds']:.1f} s: {rate:.0f} a second"
            )
        print(f"memory of {pool.num_workers} workers: {result['memory_mb']:.0f} MB (PSS)", flush=True)

        chosen = [i * args.episodes // args.stock_episodes for i in range(args.stock_episodes)]
        episodes = [[manifest.path(tasks[i]["task_id"]), first["actions"][i]] for i in chosen]
        run = subprocess.run(
            [sys.executable, "-c", STOCK], input=json.dumps(episodes), capture_output=True, text=True, check=True
        )
        stock = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))[7:])
        same = [text.strip() for i in chosen for text in first["texts"][i]] == stock.pop("texts")
        stock["steps_per_second"] = stock["steps"] / stock["step_seconds"]
        stock["reset_seconds_mean"] = stock["reset_seconds"] / len(episodes)
        per_core = result["first"]["steps_per_second"] / pool.num_workers
        result |= {"stock": stock, "same_texts": same, "ratio_per_core": per_core / stock["steps_per_second"]}
        print(
            f"stock: {stock['steps_per_second']:.1f} steps a second, reset {stock['reset_seconds_mean']:.2f} s; ours "
            f"a core {per_core:.0f} steps a second, {result['ratio_per_core']:.1f} times; texts equal: {same}",
            flush=True,
        )

        growth = []
        for done in range(0, args.resets, args.episodes):
            pool.reset([tasks[(done + i) % len(tasks)] for i in range(args.episodes)])
            growth.append({"resets": done + args.episodes, "memory_mb": memory(pool)})
        result["growth"] = growth
        print(
            "memory over resets: "
            + ", ".join(f"{g['resets']}: {g['memory_mb']:.0f} MB" for g in growth[:: max(1, len(growth) // 5)])
        )
    write_results(args.output, result)


if __name__ == "__main__":
    main()
