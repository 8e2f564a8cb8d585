"""G2PO's advantages in SkyRL (0.3.0 at `a956457`).

With `generator.step_wise_trajectories=true` a step is a row, but an estimator of the registry is called only with
the last row of each episode. `convert_to_training_input` gets the generator's lists, one entry per row.
`response_ids` contains the completion and then the environment's next message, whose tokens are the key of the next
step.

To use it: Return `GraphTrainer(**arguments)` from `get_trainer` of a subclass of `BasePPOExp`, in your own entry
point. Set `generator.step_wise_trajectories=true`. Keep `trainer.algorithm.advantage_estimator=grpo`,
`generator.merge_stepwise_output=false` and `generator.apply_overlong_filtering=false`.
"""

import torch
from skyrl.train.trainer import RayPPOTrainer

from g2po_trl.credit import step_advantages


class GraphTrainer(RayPPOTrainer):
    def convert_to_training_input(self, generator_output, uids):
        data = super().convert_to_training_input(generator_output, uids)
        columns = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "is_last_step")
        keys, rewards, groups, done = [], [], [], True
        for uid, prompt, response, mask, reward, last in zip(uids, *(generator_output[name] for name in columns)):
            if done:
                keys, rewards, groups, key = [*keys, []], [*rewards, 0.0], [*groups, uid], str(prompt)
            keys[-1].append(key)
            rewards[-1] += sum(reward)
            key, done = str([token for token, mine in zip(response, mask) if not mine]), last
        steps = [number for episode in step_advantages(keys, rewards, groups) for number in episode.tolist()]
        data.metadata["step_advantages"] = steps + [0.0] * (len(data["response_mask"]) - len(steps))  # padding's
        return data

    def compute_advantages_and_returns(self, data):
        data = super().compute_advantages_and_returns(data)
        steps = torch.tensor(data.metadata.pop("step_advantages"), dtype=torch.float32)  # (rows,)
        data["advantages"] = steps.unsqueeze(-1) * data["response_mask"]  # (rows, response_len)
        return data
