"""G2PO's advantages in ms-swift (4.6.0.dev0 at `3602360`).

`_postprocess_batch(samples, batch_encoded_inputs)` gives the advantages the shape (B, T). `self._rewards_per_func`
(N, functions) has the rewards of all ranks, `sample.messages` the whole conversation. Rows of
`grpo_batch.completion_mask` (B, T) have a run of ones for each completion.

To use it: `--external_plugins swift_graph.py` imports the file before the trainer is created. It does not support
sequence parallelism, Megatron, teachers, or `use_liger_kernel`.
"""

import numpy as np
import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory

from g2po_trl.credit import spread_over_tokens, step_advantages


class GraphGRPOTrainer(GRPOTrainer):
    def _postprocess_batch(self, samples, batch_encoded_inputs):
        super()._postprocess_batch(samples, batch_encoded_inputs)
        turns = [zip(sample.messages, sample.messages[1:]) for sample in samples]
        keys = gather_object(
            [[m["content"] for m, completion in turn if completion["role"] == "assistant"] for turn in turns]
        )
        rewards = (self._rewards_per_func * self.reward_weights).nansum(dim=1).tolist()
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages = step_advantages(keys, rewards, [number // size for number in range(len(keys))])
        mine = iter(advantages[self.accelerator.process_index * len(samples) :])
        for encoded in batch_encoded_inputs:
            mask = encoded["grpo_batch"].completion_mask
            rows = np.array([spread_over_tokens(next(mine), row) for row in mask.tolist()])
            encoded["grpo_batch"].advantages = torch.tensor(rows, dtype=torch.float32, device=mask.device)


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.GraphGRPOTrainer"
