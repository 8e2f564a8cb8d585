"""Trains with branches, on several ranks; prints what each rank has in the end."""

import hashlib
import json
import sys

import sharding
import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT
from letter_trainer import make_config
from toy_environments import Countdown

from g2po_trl import G2POTrainer

if __name__ == "__main__":
    model, output, kind, options = sys.argv[1:]
    torch.set_num_threads(1)
    given = sharding.prepare(kind)
    args = make_config(output, rollout_strategy="branching", max_steps=3, **given, **json.loads(options))
    sharding.pretend(kind)
    tasks = [{"turns": 2 + n % 4, "reward": 10.0 * (n % 3 == 0), "task_id": str(n)} for n in range(8)]
    trainer = G2POTrainer(model, args, Dataset.from_list(tasks), None, Countdown, LETTER_PROMPT)
    if trainer.accelerator.process_index == 1:
        trainer.strategy.no_return = {"7"}
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    digest = hashlib.sha256(b"".join(state[name].float().numpy().tobytes() for name in sorted(state)))
    entries = [entry for entry in trainer.state.log_history if "rollout/branches" in entry]
    print(
        json.dumps({"weights": digest.hexdigest(), "known": trainer.strategy.state_dict(), "log": entries}), flush=True
    )
    trainer.close()
