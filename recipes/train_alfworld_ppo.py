"""The same as train_alfworld.py by PPO with a critic, the actor-critic baseline.

    accelerate launch recipes/train_alfworld_ppo.py

Takes the flags of train_alfworld.py, without the estimator's, and the fields of `PPOConfig`. The critic is a second
model as large as the policy, with its own optimizer, whole on every process (one process or DDP).
"""

from train_alfworld import DEFAULT_CONFIG, main

from g2po_trl import PPOConfig, PPOTrainer

if __name__ == "__main__":
    main(PPOConfig, PPOTrainer, DEFAULT_CONFIG.with_name("tiny-ppo.yaml"))
