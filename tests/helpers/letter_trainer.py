"""The real trainer on a tiny model and the letter game, with the options every test of it shares."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment

from g2po_trl import G2POConfig, G2POTrainer, read_jsonl
from g2po_trl.update.batch import StepBatch

TASKS = Dataset.from_list([{"seed": seed} for seed in range(8)])
OPTIONS = {
    **{"per_device_train_batch_size": 8, "num_generations": 4, "max_turns": 6, "max_completion_length": 2},
    **{"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "no", "num_environment_workers": 1, "seed": 0},
    **{"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": False},
}
ARGUMENTS = {name: name for name in ("eval_dataset", "peft_config", "quantization_config", "processing_class")}
ARGUMENTS |= {"optimizers": "optimizers", "callbacks": "callbacks", "advantage_fn": "advantage_fn"}
ARGUMENTS |= {"key_function": "state_key"}  # which is a field of the configuration, too


def make_config(output_dir, config_class=G2POConfig, **options):
    return config_class(str(output_dir), **{**OPTIONS, **options})


def make_letter_trainer(
    model, output_dir, environment=LetterEnvironment, dataset=TASKS, trainer_class=G2POTrainer, **options
):
    """`model`: a folder or an object. `options`: `ARGUMENTS` of `G2POTrainer`, and fields of `G2POConfig`."""
    others = {ARGUMENTS[name]: options.pop(name) for name in ARGUMENTS.keys() & options.keys()}
    others |= {"environment_factory": environment, "prompt_template": LETTER_PROMPT}
    model = str(model) if isinstance(model, Path) else model
    return trainer_class(model, make_config(output_dir, **options), dataset, **others)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def played_in(trainer, iteration=1):
    path = Path(trainer.args.output_dir, "trajectories", f"train-{iteration:06d}.jsonl")
    return list(read_jsonl(path))


def flat_weights(trainer):
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def flat_gradient(trainer, micro_batches):
    trainer.current_gradient_accumulation_steps = 1  # transformers sets it when training starts
    trainer.model.zero_grad()
    trainer.model.train()
    for micro_batch in micro_batches:
        with trainer.update.layout.of(trainer.model, micro_batch):
            trainer.compute_loss(trainer.model, micro_batch).backward()
    return gradient_of(trainer)


def gradient_of(trainer):
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten().clone() for p in trained])


def play_batch(trainer):
    trajectories, _ = trainer.play([dict(TASKS[i // 4]) for i in range(16)])
    steps = sum(len(t.steps) for t in trajectories)
    batch = StepBatch.from_trajectories(trajectories, np.random.default_rng(0).normal(size=steps))
    batch.trained[::5] = False  # as with mask_truncated_completions
    return batch


def move_weights(model, size=0.02):
    """Away from the reference, so that the KL term has a gradient too."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += size * torch.randn(parameter.shape, generator=generator).to(parameter)


def by_layout(trainer, kinds):
    """Of one batch in each layout: the gradient, the micro-batches, and the tokens of a pass."""
    batch, found = play_batch(trainer), {}
    move_weights(trainer.model)
    for trainer.update.layout.kind in kinds:
        mini_batches, metrics = trainer.update.split([batch])
        micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
        trainer._add_log_probs([micro_batches])
        gradient, forwarded = flat_gradient(trainer, micro_batches), metrics["update/forwarded_tokens"]
        found[trainer.update.layout.kind] = gradient, micro_batches, forwarded
    return found
