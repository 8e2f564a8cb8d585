"""The same recorded step samples in several precisions and shardings, one after the other; alone or under torchrun.

For each, written to `OUTPUT/<precision>-<sharding>-<rank>.json`: of a policy that begins as the reference, the KL of
four updates at learning rate 1e-3; of one a known step away, the KL, its log-probabilities and its ratio to itself.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import sharding
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment
from letter_trainer import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import G2POTrainer, Step, Trajectory
from g2po_trl import trainer as trainer_module
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.rollout.strategy import Rollout, SynchronousRollout

PRECISIONS = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "weights": (torch.bfloat16, False)}


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
        first = int(os.environ.get("RANK", 0)) * len(rows)
        return Rollout([recorded(first + i) for i in range(len(rows))], RolloutStats())


class RecordedTrainer(G2POTrainer):
    """Trains on recorded trajectories, and keeps what its policy gave their tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log_probs_of, self.furthest_ratio, self._inputs = {}, [], None
        self.strategy = RecordedRollout(self.strategy.context)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self._inputs = inputs
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._inputs = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if (inputs := self._inputs) is not None:
            mask = inputs["completion_mask"].bool()
            ratio = (outputs[0].detach() - inputs["old_per_token_logps"]).exp() - 1
            self.furthest_ratio.append((self.iteration.step, float(ratio[mask].abs().max()) if mask.any() else 0.0))
            for i in mask.any(1).nonzero().flatten().tolist():
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
                name = str(torch.cat([prompt, inputs["completion_ids"][i][mask[i]]]).tolist())
                self.log_probs_of.setdefault(name, outputs[0][i][mask[i]].detach().float().tolist())
        return outputs


def train(model, origin, output, precision, kind, **options):
    """`model` (folder) as the policy, `origin` (folder) as the reference."""
    dtype, autocast = PRECISIONS[precision]
    environment = dict(os.environ)
    options = {
        **{"per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)), "steps_per_generation": 2},
        **{"max_steps": 4, "lr_scheduler_type": "constant", "beta": 0.1, "logging_steps": 1, "bf16": autocast},
        **{"max_tokens_per_micro_batch": 200, "save_trajectories": False, "weight_decay": 0.0},
        "overwrite": True,  # several runs follow each other in one folder
        **options,
    }
    args = make_config(output, **{**options, **sharding.prepare(kind, autocast)})
    sharding.pretend(kind)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    policy.config._name_or_path = str(origin)
    # TRL then loads the reference from there; the trainer would copy the policy.
    trainer_module.reference_copied_from = lambda *_, **__: nullcontext()
    args.model_init_kwargs = {"dtype": dtype}
    tasks = Dataset.from_list([{"seed": seed} for seed in range(4)])
    estimate, tokenizer = lambda graph: np.sin(np.arange(graph.num_steps)), AutoTokenizer.from_pretrained(origin)
    parts = (tasks, None, LetterEnvironment, LETTER_PROMPT, estimate)
    trainer = RecordedTrainer(policy, args, *parts, processing_class=tokenizer)
    if model != origin:
        compare = trainer.start_check.compare  # which refuses a reference that is another model
        trainer.start_check.compare = lambda model, **_: compare(model, with_reference=False)
    trainer.train()
    sharding.check(trainer, kind)
    assert trainer.ref_model is not None
    trainer.close()
    os.environ.clear()
    os.environ.update(environment)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    return trainer


def main(model, moved, output, cells):
    torch.set_num_threads(1)
    for cell in cells:
        precision, kind = cell.split(":")
        steps = train(model, model, output, precision, kind)
        known = train(moved, model, output, precision, kind, max_steps=1)
        measured = {
            "kl": [entry["kl"] for entry in steps.state.log_history if "kl" in entry],
            "kl_of_known_step": known.state.log_history[0]["kl"],
            "ratio_before_any_step": max(far for step, far in known.furthest_ratio if step == 0),
            "ratio_after_a_step": max(far for step, far in steps.furthest_ratio if step == 1),
            "log_probs": known.log_probs_of,
            "layout": steps.update.layout.kind,
        }
        name = f"{cell.replace(':', '-')}-{os.environ.get('RANK', '0')}.json"
        Path(output, name).write_text(json.dumps(measured))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
