"""G2PO's advantages in verl (v1 trainers, 0.10.0.dev at `1dda039`).

Estimators of the registry (`register_adv_est`) get no keys. `_compute_advantage(batch, metrics)` of the v1 trainers
reads and writes fields of the TransferQueue. A row is a whole episode; `loss_mask` (T) has a run of ones for each
turn, `rm_scores` (T) the reward at the end.

If an agent loop returns one output per step, rows are named `{uid}_{session}_{step}`. Group them by the part before
the last `_`, take one reward per session, and do not spread over tokens. In the trainer of 0.8 and earlier, replace
`verl.trainer.ppo.ray_trainer.compute_advantage(data, …)`; `data.non_tensor_batch["state_keys"]` has the keys.

To use it: Set, for every process, `VERL_USE_EXTERNAL_MODULES=verl_graph`, `trainer.v1.trainer_mode=sync_graph`,
`actor_rollout_ref.rollout.agent.default_agent_loop=graph_agent` and `algorithm.adv_estimator=grpo`, whose result is
overwritten. The registry of estimators (`register_adv_est`) cannot be used: its functions get no keys.
"""

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.trainer.ppo.v1 import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from g2po_trl.credit import spread_over_tokens, step_advantages


@register("graph_agent")
class GraphAgentLoop(ToolAgentLoop):
    async def _handle_generating_state(self, agent_data, *args, **kwargs):
        key = str(agent_data.messages[-1]["content"])  # what the model answers to
        state = await super()._handle_generating_state(agent_data, *args, **kwargs)
        agent_data.extra_fields.setdefault("state_keys", []).append(key)
        return state


@register_trainer("sync_graph")
class GraphTrainer(PPOTrainerSync):
    def _compute_advantage(self, batch, metrics):
        batch = super()._compute_advantage(batch, metrics)
        real = [key for key, tag in zip(batch.keys, batch.tags) if not tag.get("is_padding")]
        where = {"keys": real, "partition_id": batch.partition_id}
        rows = tq.kv_batch_get(**where, select_fields=["uid", "loss_mask", "rm_scores", "extra_fields"])
        keys = [fields["state_keys"] for fields in rows["extra_fields"].tolist()]
        rewards = [scores.sum().item() for scores in rows["rm_scores"].unbind()]
        advantages = step_advantages(keys, rewards, rows["uid"].tolist())
        tokens = [
            torch.tensor(spread_over_tokens(steps, mask.tolist()), dtype=torch.float32)
            for steps, mask in zip(advantages, rows["loss_mask"].unbind())
        ]
        nested = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
        fields = TensorDict({"advantages": nested, "returns": nested}, batch_size=len(real))
        tq.kv_batch_put(**where, fields=fields)
        return batch
