"""Positions through the model in layout `shared`, for orders of the rows that need less than all ranks' tokens.

    python -m benchmarks.speed.row_order RUN/trajectories/train-*.jsonl --output benchmarks/results/row_order

Rows are the step samples of a run's recorded rollouts, with their own prompts (`compact`) and with the paper's
ALFWORLD_PROMPT (`full`). Orders:

    all      lexicographic over all rows of all ranks
    rank     each rank's rows lexicographically, one rank after the other; nothing shared across that border
    group    likewise each group's rows on a rank, one group after the other
    joined   as `group`, but groups in the order of their first sequences, and the tokens that two groups begin with
             shared

Groups are dealt to ranks in order, whole or, with more ranks than groups, in parts. Mini-batches are the planner's:
random blocks with a common prefix. Prints positions of each order relative to `all` (sums over the files); writes
the counts of each file to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.common import facts, write_results
from g2po_envs.alfworld import ALFWORLD_PROMPT
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import Trajectory, read_jsonl
from g2po_trl.prompts.template import last_steps
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.update.balance import RowSummary
from g2po_trl.update.batch import BatchingConfig
from g2po_trl.update.prefix_order import Ordering, common_prefix, lexicographic

ORDERS = ("all", "rank", "group", "joined")
HISTORY, GROUP_SIZE, MAX_TOKENS = 2, 8, 2048


def full_prompt(trajectory: Trajectory, step: int, encoder: ChatEncoder) -> list[int]:
    """Return the token ids of a step's prompt in the paper's wording."""
    pairs = [(s.observation, s.action) for s in trajectory.steps[:step]]
    now = trajectory.steps[step]
    messages = ALFWORLD_PROMPT.messages(
        now.observation, trajectory.task, now.admissible_actions, last_steps(pairs, HISTORY), step
    )
    return encoder(messages)[0]


def rows_of(path: Path, prompt: str, encoder: ChatEncoder) -> tuple[list[np.ndarray], RowSummary, np.ndarray]:
    """Return the sequences of a rollout, their summary, and the episode of each."""
    sequences, prompts, completions, episodes = [], [], [], []
    for number, trajectory in enumerate(read_jsonl(path)):
        for place, step in enumerate(trajectory.steps):
            ids = step.prompt_ids if prompt == "compact" else full_prompt(trajectory, place, encoder)
            sequences.append(np.array([*ids, *step.completion_ids], dtype=np.int32))
            prompts.append(len(ids))
            completions.append(len(step.completion_ids))
            episodes.append(number)
    count = len(sequences)
    ones = np.ones(count, dtype=np.float32)
    rows = RowSummary(np.array(prompts), np.array(completions), ones, ones.astype(bool), [count], False)
    return sequences, rows, np.array(episodes)


def ordering(sequences: list[np.ndarray], name: str, ranks: np.ndarray, groups: np.ndarray) -> Ordering:
    """Return the order `name` of sequences, given the rank and the group of each."""
    if name == "all":
        return Ordering.from_sequences(sequences)
    kinds = ranks if name == "rank" else ranks * (int(groups.max()) + 1) + groups
    parts = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    parts = [part[lexicographic([sequences[row] for row in part])] for part in parts]
    if name == "joined":
        firsts = [sequences[part[0]] for part in parts]
        parts = [parts[i] for i in lexicographic(firsts)]
    order, overlaps = np.concatenate(parts), []
    for part in parts:
        border = 0
        if name == "joined" and overlaps:
            border = common_prefix(sequences[order[len(overlaps) - 1]], sequences[part[0]])
        overlaps += [border, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(part, part[1:]))]
    return Ordering.from_neighbours(order, overlaps, [len(sequence) for sequence in sequences])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model_path()))
    config = BatchingConfig(1, MAX_TOKENS, "dapo", 0, layout="shared")
    cuts = {"1 mini-batch": config, "4 mini-batches": dataclasses.replace(config, num_mini_batches=4)}
    cuts["mini_batch_size 256"] = dataclasses.replace(config, mini_batch_size=256)
    table = []
    for prompt in ("compact", "full"):
        loaded = [rows_of(path, prompt, encoder) for path in args.files]
        for num_ranks in (1, 2, 16):
            for name in ORDERS:
                counts: dict[str, list[int]] = {cut: [] for cut in cuts}
                for sequences, rows, episodes in loaded:
                    ranks = episodes * num_ranks // (int(episodes.max()) + 1)
                    found = ordering(sequences, name, ranks, episodes // GROUP_SIZE)
                    spread = dataclasses.replace(rows, counts=np.bincount(ranks, minlength=num_ranks).tolist())
                    for cut, options in cuts.items():
                        _, metrics = options.plan(spread, found, np.random.default_rng([0, 0]))
                        counts[cut].append(int(metrics["update/forwarded_tokens"]))
                for cut, values in counts.items():
                    table.append(
                        {"prompt": prompt, "ranks": num_ranks, "mini_batches": cut, "order": name, "positions": values}
                    )
    totals = {(r["prompt"], r["ranks"], r["mini_batches"], r["order"]): sum(r["positions"]) for r in table}
    for (prompt, num_ranks, cut, name), total in totals.items():
        if name == "all":
            others = [totals[prompt, num_ranks, cut, other] / total - 1 for other in ORDERS[1:]]
            shares = "  ".join(f"{other} {share:+.2%}" for other, share in zip(ORDERS[1:], others))
            print(f"{prompt:8} {num_ranks:3} ranks  {cut:20} all {total:9,}  {shares}", flush=True)
    write_results(args.output, {**facts("numpy"), "files": [path.name for path in args.files], "counts": table})


if __name__ == "__main__":
    main()
