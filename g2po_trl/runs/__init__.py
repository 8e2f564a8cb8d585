"""Runs: what a run leaves behind, and how it is taken up again.

It imports `environments`, `rollout` and `credit`, and no trainer. It gives checkpoints, the run's description,
evaluations on panels, the model card, metrics, and what a user watches meanwhile.
"""
