"""Runs: the files that a run writes, and how it is resumed.

It imports the rooms from `prompts` to `credit`, and no trainer. It gives checkpoints, the run's description,
evaluations on panels, the model card, metrics, and progress output.
"""
