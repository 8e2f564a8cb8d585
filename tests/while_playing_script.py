"""Trains with or without `update_while_playing`, and writes weights and log; run alone or as one of several ranks."""

import json
import sys

import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, PatchyEnvironment
from letter_trainer import make_config
from letters_engine import LettersEngine

from g2po_trl import G2POTrainer, parts


class Impatient(LettersEngine):
    def is_held(self, key):
        return key >= self.trainer.args.num_generations  # of the group that is on both ranks

    def must_wait(self):
        return self.trainer.accelerator.process_index == 0 and super().must_wait()


def main(model, output, ranks, loss_type, on):
    parts.make_engine = Impatient
    args = make_config(
        output,
        per_device_train_batch_size=24 // int(ranks),
        num_generations=8,
        max_completion_length=4,
        max_steps=3,
        learning_rate=1e-2,
        optim="sgd",
        loss_type=loss_type,
        beta=0.1,
        max_grad_norm=100.0,
        max_tokens_per_micro_batch=300,
        logging_steps=1,
        shuffle_dataset=False,
        vllm_servers=["http://localhost:1"],
        update_while_playing=on == "on",
    )
    tasks = Dataset.from_list([{"seed": seed} for seed in (0, 2, 4)])
    trainer = G2POTrainer(model, args, tasks, None, PatchyEnvironment, LETTER_PROMPT)
    rank, passes = trainer.accelerator.process_index, []
    if trainer.while_playing:
        early = trainer.while_playing.early
        if rank == 1:
            early.members = 0  # this rank never has a group that is complete
        train = early.train
        early.train = lambda rows: passes.append(trainer.iteration.step) or train(rows)
    trainer.train()
    torch.save(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), f"{output}/weights-{rank}.pt")
    with open(f"{output}/facts-{rank}.json", "w") as file:
        json.dump({"log": trainer.state.log_history, "passes": passes}, file)
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
