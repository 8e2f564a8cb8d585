"""Train an agent on WebShop by PPO with a critic, the actor-critic baseline: `python recipes/train_webshop_ppo.py`.

Takes the flags of train_webshop.py except the estimator's, and the fields of `PPOConfig`. The critic is a second
model of the policy's size with its own optimizer, not sharded (one process or DDP).
"""

from dataclasses import replace

from train_webshop import RECIPE as G2PO

from g2po_trl import PPOConfig, PPOTrainer

RECIPE = replace(G2PO, config="webshop/tiny-ppo", config_class=PPOConfig, trainer_class=PPOTrainer)

if __name__ == "__main__":
    RECIPE.train()
