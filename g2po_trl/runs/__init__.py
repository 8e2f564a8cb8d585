"""Runs: the files that a run writes, and how it is resumed.

It contains checkpoints, the run's description, evaluations on fixed sets of tasks, the model card, metrics and
progress output. It imports the packages from `prompts` to `credit`, and no trainer.
"""
