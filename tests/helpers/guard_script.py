"""One of two ranks gets a gradient that is not finite, in its second optimizer step; each writes what it was told."""

import json
import sys
from pathlib import Path

import sharding
import torch
from distributed_script import build
from spoiled_gradients import spoil
from transformers import TrainerCallback


class Weights(TrainerCallback):
    """All of them, after each optimizer step."""

    def __init__(self, whole):
        self.whole = whole

    def on_step_end(self, args, state, control, **kwargs):
        self.latest = self.whole()


def main(model, output, kind):
    trainer = build(model, output, "groups over both ranks", "dapo", kind, optim="adamw_torch", eval_on_start=False)
    rank, weights = trainer.accelerator.process_index, Weights(lambda: sharding.whole_weights(trainer, kind))

    def is_spoiled(ids):
        part = trainer.iteration.mini_batches[1]
        return rank == 1 and trainer.state.global_step == 1 and torch.equal(ids, part[0]["row_ids"])

    spoil(trainer.model, is_spoiled)
    trainer.add_callback(weights)
    told = None
    try:
        trainer.train()
    except FloatingPointError as error:
        told = str(error)
    sharding.check(trainer, kind)
    same = bool(torch.equal(weights.latest, weights.whole()))
    found = {"told": told, "same": same, "step": trainer.state.global_step}
    Path(output, f"told-{rank}.json").write_text(json.dumps(found))
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
