"""G2PO's advantages in verl-agent (read in a public fork, `vanzll/verl-agent` at `12bab18`).

A step is a row, and `batch.non_tensor_batch` has everything, each (rows,): `anchor_obs`, `uid` (the group),
`traj_uid`, `episode_rewards`, `is_action_valid`. With `algorithm.adv_estimator=gigpo`, the trainer calls one
function of `gigpo.core_gigpo` before it copies and reorders rows, and another that spreads the result over tokens.

To use it: Import the file at the start of `TaskRunner.run` in `main_ppo.py`, and set `algorithm.adv_estimator=gigpo`.
"""

import numpy as np
import torch
from gigpo import core_gigpo

from g2po_trl.credit import step_advantages


def advantages_of_rows(batch, gamma):
    """In place of the steps' discounted returns: (rows,)."""
    columns = batch.non_tensor_batch
    episodes = {}
    for row, episode in enumerate(columns["traj_uid"]):
        episodes.setdefault(episode, []).append(row)
    keys = [[str(columns["anchor_obs"][row]) for row in rows] for rows in episodes.values()]
    first = [rows[0] for rows in episodes.values()]
    rewards = [float(columns["episode_rewards"][row]) for row in first]
    advantages = np.zeros(len(columns["uid"]))
    for rows, steps in zip(episodes.values(), step_advantages(keys, rewards, columns["uid"][first], gamma=gamma)):
        advantages[rows] = steps
    return torch.tensor(advantages, dtype=torch.float32)


def to_tokens(step_rewards, response_mask, **others):
    advantages = step_rewards.unsqueeze(-1) * response_mask  # (rows, response_length)
    return advantages, advantages


core_gigpo.compute_step_discounted_returns = advantages_of_rows
core_gigpo.compute_gigpo_outcome_advantage = to_tokens
