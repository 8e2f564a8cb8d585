"""A start for reinforcement learning: demonstrations of an expert, learned by supervised fine-tuning."""
