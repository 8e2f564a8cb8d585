"""The real trainer on a tiny model and the letter game, with the options every test of it shares."""

import numpy as np
import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment

from g2po_trl import G2POConfig, G2POTrainer
from g2po_trl.update.batch import StepBatch

TASKS = Dataset.from_list([{"seed": seed} for seed in range(8)])
OPTIONS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_turns": 6,
    "max_completion_length": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "num_environment_workers": 1,
    "disable_tqdm": False,
    "seed": 0,
}


def make_config(output_dir, config_class=G2POConfig, **options):
    return config_class(str(output_dir), **{**OPTIONS, **options})


def make_letter_trainer(
    model,
    output_dir,
    environment=LetterEnvironment,
    advantage_fn=None,
    key_function=None,
    dataset=TASKS,
    eval_dataset=None,
    peft_config=None,
    quantization_config=None,
    processing_class=None,
    **options,
):
    """`options` are fields of `G2POConfig`; `key_function` is the trainer's `state_key`."""
    return G2POTrainer(
        model=str(model),
        args=make_config(output_dir, **options),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        environment_factory=environment,
        prompt_template=LETTER_PROMPT,
        advantage_fn=advantage_fn,
        state_key=key_function,
        peft_config=peft_config,
        quantization_config=quantization_config,
        processing_class=processing_class,
    )


def flat_weights(trainer):
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def flat_gradient(trainer, micro_batches):
    trainer.current_gradient_accumulation_steps = 1  # transformers sets it when training starts
    trainer.model.zero_grad()
    trainer.model.train()
    for micro_batch in micro_batches:
        trainer.compute_loss(trainer.model, micro_batch).backward()
    return torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters() if p.requires_grad])


def play_batch(trainer):
    trajectories, _ = trainer.play([dict(TASKS[i // 4]) for i in range(16)])
    steps = sum(len(t.steps) for t in trajectories)
    batch = StepBatch.from_trajectories(trajectories, np.random.default_rng(0).normal(size=steps))
    batch.trained[::5] = False  # as with mask_truncated_completions
    return batch


def move_weights(trainer):
    with torch.no_grad():  # away from the reference, so that the KL term has a gradient too
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.manual_seed(1)))
