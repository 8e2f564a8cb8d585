"""Train an agent on ALFWorld by PPO with a critic, the actor-critic baseline.

    python recipes/train_alfworld_ppo.py

Takes the flags of train_alfworld.py except the estimator's, and the fields of `PPOConfig`. The critic is a second
model of the policy's size with its own optimizer, not sharded (one process or DDP).
"""

from train_alfworld import DEFAULT_CONFIG as G2PO_CONFIG
from train_alfworld import ScriptArguments, tasks, tiny_model_path
from trl import ModelConfig

from g2po_trl import PPOConfig, PPOTrainer
from g2po_trl.cli.recipe import train

TYPES = (ScriptArguments, PPOConfig, ModelConfig)
DEFAULT_CONFIG = G2PO_CONFIG.with_name("tiny-ppo.yaml")

if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "ALFWorld", tiny_model_path(), PPOTrainer)
