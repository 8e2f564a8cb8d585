"""Cold start: supervised fine-tuning on demonstrations of an expert, before reinforcement learning."""
