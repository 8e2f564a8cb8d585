"""A run of 24 optimizer steps over three epochs with a checkpoint at each, two to an iteration; killed by its test."""

import os
import signal
import sys

import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LongLetterEnvironment

from g2po_trl import G2POConfig, G2POTrainer, persistence

if __name__ == "__main__":
    model, output, resume = sys.argv[1:]
    torch.set_num_threads(1)
    args = G2POConfig(
        output,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        num_generations=4,
        max_turns=5,
        max_completion_length=3,
        max_steps=int(os.environ.get("MAX_STEPS", 24)),
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        beta=0.05,
        save_steps=1,
        save_total_limit=3,
        eval_strategy="steps",
        eval_steps=4,
        num_environment_workers=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    tasks = Dataset.from_list([{"seed": seed} for seed in range(8)])
    trainer = G2POTrainer(model, args, tasks, tasks, LongLetterEnvironment, LETTER_PROMPT)
    if last := os.environ.get("KILL_WHEN_SAVING"):
        save = persistence.save_rollout_state

        def die(*arguments, **kwargs):
            if trainer.state.global_step == int(last):
                os.kill(os.getpid(), signal.SIGKILL)
            save(*arguments, **kwargs)

        persistence.save_rollout_state = die
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(output)
    trainer.close()
