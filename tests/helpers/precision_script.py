"""Trains in bfloat16 on recorded step samples, and writes what the policy gave their tokens; run under torchrun."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import sharding
import torch
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment
from letter_trainer import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import G2POTrainer, Step, Trajectory
from g2po_trl import trainer as trainer_module
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.rollout.strategy import Rollout, SynchronousRollout


def recorded(number: int) -> Trajectory:
    """A trajectory of random tokens: three steps, prompts that begin alike."""
    rng = np.random.default_rng(number)
    start = np.random.default_rng(number // 4).integers(3, 300, 20).tolist()
    steps = []
    for turn in range(3):
        start = [*start, *rng.integers(3, 300, 10).tolist()]
        completion = rng.integers(3, 300, int(rng.integers(2, 9))).tolist()
        steps.append(Step(f"room {turn}", "go", prompt_ids=start, completion_ids=completion, logprobs=None))
    return Trajectory(f"task {number // 4}", steps, float(number % 2), "success" if number % 2 else "failure")


class RecordedRollout(SynchronousRollout):
    def collect(self, rows, groups, iteration):
        first = int(os.environ["RANK"]) * len(rows)
        return Rollout([recorded(first + i) for i in range(len(rows))], RolloutStats())


class RecordedTrainer(G2POTrainer):
    """Keeps the log-probabilities of each row when it was first trained on, and each step's largest ratio, less 1."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log_probs_of, self.ratios, self.inputs = {}, {}, None
        self.strategy = RecordedRollout(self.strategy.context)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.inputs = inputs
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.inputs = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if (inputs := self.inputs) is not None:
            mask, step = inputs["completion_mask"].bool(), self.iteration.step
            ratio = ((outputs[0].detach() - inputs["old_per_token_logps"]).exp() - 1).abs()[mask]
            self.ratios[step] = max([self.ratios.get(step, 0.0), *ratio.tolist()])
            for i in mask.any(1).nonzero().flatten().tolist():
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
                name = str(torch.cat([prompt, inputs["completion_ids"][i][mask[i]]]).tolist())
                self.log_probs_of.setdefault(name, outputs[0][i][mask[i]].detach().float().tolist())
        return outputs


def main(policy, origin, output, kind, steps):
    """`policy` and `origin`: folders, that of the reference is `origin`."""
    options = {
        **{"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": int(steps), "bf16": True},
        **{"lr_scheduler_type": "constant", "beta": 0.1, "logging_steps": 1, "weight_decay": 0.0},
        **{"max_tokens_per_micro_batch": 200, "save_trajectories": False},
    }
    args = make_config(output, **{**options, **sharding.prepare(kind, bf16=True)})
    sharding.pretend(kind)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    model.config._name_or_path = origin
    # TRL then loads the reference from there; the trainer would copy the policy.
    trainer_module.reference_copied_from = lambda *_, **__: nullcontext()
    args.model_init_kwargs = {"dtype": torch.float32}
    tasks = Dataset.from_list([{"seed": seed} for seed in range(4)])
    estimate, tokenizer = lambda graph: np.sin(np.arange(graph.num_steps)), AutoTokenizer.from_pretrained(origin)
    parts = (tasks, None, LetterEnvironment, LETTER_PROMPT, estimate)
    trainer = RecordedTrainer(model, args, *parts, processing_class=tokenizer)
    if policy != origin:
        compare = trainer.start_check.compare  # which refuses a reference that is another model
        trainer.start_check.compare = lambda model, **_: compare(model, with_reference=False)
    trainer.train()
    sharding.check(trainer, kind)
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    measured = {"kl": kl, "ratios": list(trainer.ratios.values()), "log_probs": trainer.log_probs_of}
    Path(output, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(measured))
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
