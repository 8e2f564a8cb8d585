"""A run of 24 optimizer steps over three epochs with a checkpoint at each, two to an iteration; killed by its test."""

import os
import signal
import sys

import torch
from letter_environment import LongLetterEnvironment
from letter_trainer import TASKS, make_letter_trainer

if __name__ == "__main__":
    model, output, resume = sys.argv[1:]
    torch.set_num_threads(1)
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_turns": 5, "max_completion_length": 3}
    options |= {"max_steps": int(os.environ.get("MAX_STEPS", 24)), "learning_rate": 1e-2, "beta": 0.05}
    options |= {"lr_scheduler_type": "linear", "value_lambda": 0.5, "save_strategy": "steps", "save_steps": 1}
    options |= {"save_total_limit": 3, "eval_dataset": TASKS, "eval_strategy": "steps", "eval_steps": 4}
    trainer = make_letter_trainer(model, output, LongLetterEnvironment, **options)
    if last := os.environ.get("KILL_WHEN_SAVING"):
        save = trainer.resumption.save

        def die(*arguments, **kwargs):
            if trainer.state.global_step == int(last):
                os.kill(os.getpid(), signal.SIGKILL)
            save(*arguments, **kwargs)

        trainer.resumption.save = die
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(output)
    trainer.close()
