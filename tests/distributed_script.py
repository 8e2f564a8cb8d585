"""Trains two steps on episodes that do not depend on chance and writes the weights; run alone or under torchrun."""

import sys

import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LongLetterEnvironment

from g2po_trl import G2POConfig, G2POTrainer


def advantages(graph):
    """Anything that differs from step to step and needs the whole group."""
    return graph.position - 0.3 * graph.trajectory + graph.returns - graph.returns.mean()


if __name__ == "__main__":
    model, output, loss_type, rows = sys.argv[1:]
    args = G2POConfig(
        output,
        per_device_train_batch_size=int(rows),
        steps_per_generation=1,
        num_generations=8,
        max_turns=6,
        max_completion_length=3,
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        loss_type=loss_type,
        beta=0.1,
        max_tokens_per_micro_batch=200,
        generation_kwargs={"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
        num_environment_workers=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    tasks = Dataset.from_list([{"seed": seed} for seed in range(8)])
    trainer = G2POTrainer(model, args, tasks, None, LongLetterEnvironment, LETTER_PROMPT, advantages)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
    torch.save(weights, f"{output}/weights-{trainer.accelerator.process_index}.pt")
    trainer.close()
