"""Bytes that a rank receives when step samples are dealt out anew: every sample to every rank, and as it is done.

    python -m torch.distributed.run --standalone --nproc_per_node 4 -m benchmarks.speed.exchange --tokens 4000

Real ranks over gloo; synthetic step samples: groups of 8 episodes, a
quarter of a prompt the same in all of a group, 40 pages that prompts of a group end in, completions of 150 random
tokens with log-probabilities.
"""

from __future__ import annotations

import argparse
import pickle
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object

from g2po_trl.update.batch import BatchingConfig, StepBatch, make_mini_batches
from g2po_trl.update.redistribute import make_mini_batches_over_ranks

COMPLETION = 150
CUT = BatchingConfig(4, 16384, "dapo", 0, layout="shared")


def step_samples(rank: int, tokens: int, episodes: int, turns: int, pages: int = 40) -> StepBatch:
    """Those that a rank has played. `pages`: of a group; 0: every prompt has one of its own."""
    rng, prompts, completions = np.random.default_rng(rank), [], []
    for episode in range(rank * episodes, (rank + 1) * episodes):
        group = episode // 8
        task = np.random.default_rng([7, group]).integers(0, 150_000, tokens // 4)
        for turn, page in enumerate(rng.integers(pages or 1, size=turns).tolist()):
            words = np.random.default_rng([8, group, page] if pages else [9, episode, turn])
            words = words.integers(0, 150_000, tokens - COMPLETION - len(task))
            prompts.append(np.concatenate([task, words]).astype(np.int32))
            completions.append(rng.integers(0, 150_000, COMPLETION).astype(np.int32))
    count = len(prompts)
    logprobs = [rng.normal(size=COMPLETION).astype(np.float32) for _ in range(count)]
    return StepBatch(prompts, completions, rng.normal(size=count).astype(np.float32), np.ones(count, bool), logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="of a step sample")
    parser.add_argument("--episodes", type=int, default=16, help="of a rank")
    parser.add_argument("--turns", type=int, default=20, help="of an episode")
    args = parser.parse_args()
    torch.set_num_threads(1)
    PartialState(cpu=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local, received = step_samples(rank, args.tokens, args.episodes, args.turns), 0

    def gather(thing: Any) -> list[Any]:
        """Counts what the others send, each filled up to the longest."""
        nonlocal received
        received += max(gather_object([len(pickle.dumps(thing))])) * (ranks - 1)
        return gather_object([thing])

    all_to_all = dist.all_to_all_single

    def counted(output, sent, output_sizes, sent_sizes):
        nonlocal received
        received += 4 * (sum(output_sizes) - output_sizes[rank])
        return all_to_all(output, sent, output_sizes, sent_sizes)

    dist.all_to_all_single = counted
    found, totals, seconds = {}, {}, {}
    for name in ("every sample to every rank", "samples to the rank that trains them"):
        received, started = 0, time.perf_counter()
        rng = np.random.default_rng(0)
        if name.startswith("every"):
            found[name] = make_mini_batches(gather(local), rank, CUT, rng)
        else:
            found[name] = make_mini_batches_over_ranks(local, rank, CUT, rng, gather, torch.device("cpu"))
        totals[name], seconds[name] = received, time.perf_counter() - started
    (one, _), (other, _) = found.values()
    for part, same in zip(one, other, strict=True):
        for micro_batch, twin in zip(part, same, strict=True):
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(twin[k])) for k, v in micro_batch.items())
    if rank == 0:
        print(f"{ranks} ranks, {len(local)} step samples of {args.tokens} tokens each; the same micro-batches:")
        for name, total in totals.items():
            print(f"  {name}: {total / 1e6:.1f} MB received by a rank, {seconds[name]:.1f} s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
