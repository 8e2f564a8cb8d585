"""The update by token layout on the same recorded step samples: CPU seconds, positions, memory and planning.

    python -m benchmarks.speed.positions --output benchmarks/results/positions [--before CHECKOUT] [--samples 96]
        [--budget 2048] [--threads 1] [--repetitions 5] [--model tiny|135m] [--layers 30] [--episodes 64]

The tiny model plays one iteration of generated ALFWorld games twice: prompts are windows of two turns, or whole
conversations (kept in OUTPUT as `windows.jsonl.gz` and `conversations.jsonl.gz`: token ids of each step sample). The
first `--samples` of them are trained, by the tiny model or by a Llama of SmolLM2-135M's shape with random weights.
Each checkout has a process of its own (`updates.py`), and arms take turns in each repetition:

    tree      common tokens once (`token_layout="shared"`)
    before    the same, by the code of another checkout, with `--before`
    padded    a sample a row (`token_layout="padded"`)
    trl       GRPOTrainer's batch: every row padded to the longest prompt and the longest completion
    floor     the model's body over as many tokens as are different, in rows of the mean length: no LM head, no loss

CPU seconds are those of forward and backward passes. Memory is what they add to the peak of a new process, gradients
included. Positions are tokens that pass through the model, with padding, in a plan of all recorded
step samples; `async` are the rows of TRL's AsyncGRPO (`TreeRow`), fed in lexicographic order. Planning has copies of
the samples with other tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, facts, interleaved, medians, write_results
from benchmarks.trees import make_trees
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.prefix_order import PrefixOrder

SAMPLES = {"windows": {}, "conversations": {"history": "conversation"}}
BUDGETS, MINI_BATCHES = (2048, 4096, 16384, 32768), (1, 2, 4, 8)
PLANNED, RANKS = (960, 10_000), (1, 8)


def play(folder: Path, episodes: int, **options: Any) -> StepBatch:
    """Return the step samples of one iteration of the tiny model."""
    from benchmarks.speed.phases import make_trainer

    trainer, tasks = make_trainer(folder, episodes, **options)
    trajectories, _ = trainer.play(tasks, groups=[i // 8 for i in range(len(tasks))])
    trainer.close()
    return StepBatch.from_trajectories(trajectories, np.ones(sum(len(t.steps) for t in trajectories)))


def recorded(path: Path, episodes: int, **options: Any) -> StepBatch:
    """Return the step samples of a file, which is made if it is not there."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            batch = play(Path(folder), episodes, **options)
        lines = [json.dumps([p.tolist(), c.tolist()]) for p, c in zip(batch.prompt_ids, batch.completion_ids)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    prompts, completions = ([np.array(row[part], dtype=np.int32) for row in rows] for part in (0, 1))
    ones = np.ones(len(rows))
    return StepBatch(prompts, completions, ones.astype(np.float32), ones.astype(bool))


def part_of(batch: StepBatch, rows: Sequence[int]) -> StepBatch:
    """Return these rows of a batch."""
    return StepBatch(
        [batch.prompt_ids[row] for row in rows],
        [batch.completion_ids[row] for row in rows],
        batch.advantages[list(rows)],
        batch.trained[list(rows)],
    )


class Worker:
    """A checkout's updates, in a process of its own.

    Args:
        checkout: a folder of the repository.
        settings: of `updates.py`.
    """

    def __init__(self, checkout: Path, settings: dict[str, Any]):
        command = [sys.executable, "-P", str(ROOT / "benchmarks/speed/updates.py"), json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_WAIT_POLICY": "passive"}
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, cwd=checkout, env=environment, **pipes)

    def ask(self, function: str, **arguments: Any) -> Any:
        """Return what a method of `Updates` returns."""
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"updates.py ended with code {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def async_positions(sequences: Sequence[np.ndarray], completions: Sequence[int], budget: int) -> int:
    """Return the positions of AsyncGRPO's rows."""
    from trl.experimental.async_grpo.packing import TreeRow

    rows = [TreeRow()]
    for index in PrefixOrder(sequences).rows:
        ids = sequences[index]
        mask = np.arange(len(ids)) >= len(ids) - completions[index]
        sample = {"input_ids": ids, "completion_mask": mask, "group_id": 0, "advantage": 1.0}
        if rows[-1].samples and not rows[-1].fits(sample, budget):
            rows.append(TreeRow())
        rows[-1].add(sample)
    return sum(len(row.tokens) for row in rows)


def compare(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all that is measured with the step samples of a file."""
    names = ("samples", "budget", "threads", "model", "layers")
    settings = {"file": str(file.resolve()), **{name: getattr(options, name) for name in names}}
    checkouts = {"tree": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    batch = recorded(file, options.episodes)
    sequences, completions = batch.sequences(), list(map(len, batch.completion_ids))
    of_file = {
        "step samples": len(batch),
        "tokens": sum(map(len, sequences)),
        "timed": options.samples,
    }
    workers = {name: Worker(checkout, settings) for name, checkout in checkouts.items()}
    arms = {name: (worker, "shared") for name, worker in workers.items()}
    arms |= {name: (workers["tree"], name) for name in ("padded", "trl", "floor")}

    def update(name: str, repetition: int) -> float:
        worker, layout = arms[name]
        return worker.ask("update", layout=layout, warm_up=repetition < 0)

    if options.repetitions:
        of_file["CPU seconds"] = interleaved({name: partial(update, name) for name in arms}, options.repetitions)
        distances = {name: workers["tree"].ask("distance", layout=arms[name][1]) for name in ("tree", "trl")}
        of_file["gradient, relative distance to padded"] = distances
    of_file["positions by budget"], of_file["positions by mini-batches"] = {}, {}
    for budget in BUDGETS:
        found = {name: worker.ask("plan", layout="shared", budget=budget) for name, worker in workers.items()}
        found["async"] = async_positions(sequences, completions, budget)
        found["padded"] = workers["tree"].ask("plan", layout="padded", budget=budget)
        of_file["positions by budget"][budget] = found
    longest = max(map(len, batch.prompt_ids)) + max(completions)
    different = sum(tree.num_tokens for tree in make_trees(sequences, 2**40))
    of_file |= {"positions of trl": len(batch) * longest, "different tokens": different}
    for number in MINI_BATCHES:
        asked = {"layout": "shared", "budget": options.budget, "mini_batches": number}
        found = {name: worker.ask("plan", **asked) for name, worker in workers.items()}
        of_file["positions by mini-batches"][number] = found
    of_file["planning"] = {
        f"{number:,} samples, ranks: {ranks}": {
            name: worker.ask("planning", layout="shared", number=number, ranks=ranks)
            for name, worker in workers.items()
        }
        for number in PLANNED
        for ranks in RANKS
    }
    for worker in workers.values():
        worker.close()
    of_file["memory, MiB"] = {}
    for name, layout in [*((name, "shared") for name in checkouts), ("padded", "padded")]:
        worker = Worker(checkouts.get(name, ROOT), settings)
        of_file["memory, MiB"][name] = worker.ask("memory", layout=layout)
        worker.close()
    return of_file


def page(result: dict[str, Any]) -> str:
    """Return the page of a results file."""
    text = [
        "# The update by layout, on recorded step samples",
        f"One iteration of generated ALFWorld games, played by the tiny model; written by `{result['command']}`, from "
        "[results.json](results.json). The docstring of the program defines arms and counts. CPU seconds are medians "
        f"of {result['repetitions']} repetitions.",
    ]
    for name in SAMPLES:
        of = result[name]
        text += [f"## {name.capitalize()}"]
        text += [
            f"{of['step samples']} step samples, {of['tokens']:,} tokens, of which {of['different tokens']:,} are "
            f"different; GRPOTrainer's batch has {of['positions of trl']:,} positions. {of['timed']} are timed."
        ]
        middle = medians(of.get("CPU seconds", {}))
        distances = of.get("gradient, relative distance to padded", {})
        rows = [
            [
                f"`{arm}`",
                f"{seconds:.3f}",
                f"{seconds / middle['tree']:.2f}×",
                str(of["memory, MiB"].get(arm, "")),
                f"{distances[arm]:.0e}" if arm in distances else "",
            ]
            for arm, seconds in middle.items()
        ]
        text.append(table(["Arm", "CPU seconds", "Arm / tree", "Memory, MiB", "Gradient, from padded"], rows))
        for title, key in (("Budget", "positions by budget"), ("Mini-batches", "positions by mini-batches")):
            counted = of[key]
            columns = list(next(iter(counted.values())))
            rows = [[f"{int(number):,}", *(f"{row[arm]:,}" for arm in columns)] for number, row in counted.items()]
            text.append(table([title, *(f"`{arm}`, positions" for arm in columns)], rows))
        columns = list(next(iter(of["planning"].values())))
        rows = [
            [of_plan, *(f"{row[arm]['seconds']:.3f} s, {row[arm]['forwarded_tokens']:,}" for arm in columns)]
            for of_plan, row in of["planning"].items()
        ]
        text.append(table(["Plan", *(f"`{arm}`, CPU seconds and positions" for arm in columns)], rows))
    return "\n\n".join(text) + "\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="folder of another checkout to compare with")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--samples", type=int, default=96, help="step samples that are trained")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--threads", type=int, default=1, choices=(1, 2))
    parser.add_argument("--repetitions", type=int, default=5, help="0: nothing is timed")
    parser.add_argument("--model", choices=("tiny", "135m"), default="tiny")
    parser.add_argument("--layers", type=int, default=30, help="of the larger model")
    options = parser.parse_args()
    result = facts("torch", "trl", "transformers", repetitions=options.repetitions)
    for name, settings in SAMPLES.items():
        file = options.output / f"{name}.jsonl.gz"
        recorded(file, options.episodes, **settings)
        result[name] = compare(file, options)
        write_results(options.output, result)  # as far as it has come
    (options.output / "README.md").write_text(page(result), encoding="utf-8")
    print(page(result))


if __name__ == "__main__":
    main()
