"""Bytes that each of many ranks would send and receive to deal step samples out anew: counted, in one process.

    python benchmarks/exchange_counted.py --output benchmarks/results/exchange [--ranks 64] [--episodes 128] ...

What is sent is made by the code that sends it, for one rank after another: lengths and advantages, hashes of what
sequences begin with, the tokens where they part; then the real plan says which rows move. A gathered object counts as
its pickle, filled up to the longest rank's, from every other rank, as `torch.distributed` sends it. The step samples
are those of `exchange.py`, whose count over real ranks is the check (`--ranks 4 --episodes 16 --turns 20`). Adds a
record to OUTPUT/results.json: the bytes by message and rank, and CPU seconds that *each* rank spends on its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from exchange import CUT, step_samples

from g2po_trl.json_text import write_json
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.ordering import Beginnings, PrefixTree
from g2po_trl.update.planning import MicroBatchPlan, Rows


def gathered(sizes: Sequence[int]) -> int:
    """Bytes that a rank receives of an object of each of the others, by the sizes of all."""
    return max(sizes) * (len(sizes) - 1)


def pickled(thing: Any) -> int:
    """As `gather_object` sends it."""
    return len(pickle.dumps([thing]))


def slices(plan: Sequence[Sequence[MicroBatchPlan]]) -> list[list[int]]:
    """Rows of each slice, whoever trains them."""
    return [sorted(row for planned in part for own in planned.rows for row in own) for part in plan]


def count(ranks: int, make: Callable[[int], StepBatch]) -> dict[str, Any]:
    """`make(rank)` are its step samples; it is called twice for each, so that they need not be held."""
    sizes: dict[str, list[int]] = {name: [] for name in ("all samples", "lengths", "hashes", "deciding tokens")}
    seconds, summaries, beginnings = {}, [], []
    for rank in range(ranks):
        local = make(rank)
        clock = time.process_time()
        summaries.append(local.summary)
        beginnings.append(Beginnings.of(local.sequences()))
        seconds["own hashes"] = time.process_time() - clock
        sizes["all samples"].append(pickled(local))
        sizes["lengths"].append(pickled(summaries[-1]))
        sizes["hashes"].append(pickled(beginnings[-1]))
    rows = Rows.concatenate(summaries)
    clock = time.process_time()
    tree, tokens = PrefixTree.of(beginnings), []
    seconds["prefix tree"] = time.process_time() - clock
    for rank in range(ranks):
        tokens.append(tree.deciding_tokens(make(rank).sequences(), rank))
        sizes["deciding tokens"].append(pickled(tokens[-1]))
    clock = time.process_time()
    ordering = tree.order(tokens)
    seconds["order"] = time.process_time() - clock
    clock = time.process_time()
    plan, metrics = CUT.plan(rows, ordering, np.random.default_rng(0))
    seconds["plan"] = time.process_time() - clock

    row_bytes = 4 * (rows.prompts.astype(np.int64) + rows.replies * (1 + rows.with_logprobs))
    player = np.repeat(np.arange(ranks), rows.counts)
    trainer = np.full(len(rows), -1)
    for part in plan:
        for planned in part:
            for rank, own in enumerate(planned.rows):
                trainer[own] = rank
    moves = (trainer >= 0) & (trainer != player)
    received = np.bincount(trainer[moves], row_bytes[moves], ranks)
    sent = np.bincount(player[moves], row_bytes[moves], ranks)
    planning = {name: gathered(of) for name, of in sizes.items() if name != "all samples"}
    before, total = gathered(sizes["all samples"]), sum(planning.values()) + received.max()
    alike = {}
    for other in {1, max(1, ranks // 8), ranks * 2}:
        spread = replace(rows, counts=[len(part) for part in np.array_split(np.arange(len(rows)), other)])
        alike[str(other)] = slices(CUT.plan(spread, ordering, np.random.default_rng(0))[0]) == slices(plan)
    return {
        "step samples": len(rows),
        "received by a rank, MB": {
            "all samples to all ranks": round(before / 1e6, 3),
            **{name: round(value / 1e6, 3) for name, value in planning.items()},
            "rows it trains, the most of any rank": round(received.max() / 1e6, 3),
            "rows it trains, mean": round(received.mean() / 1e6, 3),
            "together": round(total / 1e6, 3),
        },
        "rows that a rank sends, the most, MB": round(sent.max() / 1e6, 3),
        "share of all to all": round(total / before, 4),
        "CPU seconds of each rank": {name: round(value, 2) for name, value in seconds.items()},
        "peak memory of this process, GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "the same slices for these numbers of ranks": alike,
        "metrics": {name: round(float(value), 4) for name, value in metrics.items()},
        "raw": {"pickled": sizes, "received": received.astype(int).tolist(), "sent": sent.astype(int).tolist()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000, help="of a step sample")
    parser.add_argument("--episodes", type=int, default=128, help="of a rank")
    parser.add_argument("--turns", type=int, default=50, help="of an episode")
    parser.add_argument("--pages", type=int, default=40, help="of a group; 0: every prompt has one of its own")
    options = parser.parse_args()
    sample = (options.tokens, options.episodes, options.turns, options.pages)
    found = count(options.ranks, lambda rank: step_samples(rank, *sample))
    print(json.dumps({name: value for name, value in found.items() if name != "raw"}, indent=1))
    path = options.output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    name = f"{options.ranks} ranks x {options.episodes} episodes x {options.turns} turns, {options.tokens} tokens"
    name += f", {options.pages or 'no'} pages"
    machine = f"{platform.machine()}, {os.cpu_count()} cores; other jobs beside it"
    results[name] = {"command": "python benchmarks/exchange_counted.py " + " ".join(sys.argv[1:]), "machine": machine}
    results[name] |= found
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(path, results, indent=1)


if __name__ == "__main__":
    main()
