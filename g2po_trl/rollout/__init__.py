"""Rollout: tasks in, trajectories out.

It imports prompts, environments and engines, and knows no trainer, graph or update. `Player` plays many episodes
concurrently; a strategy decides which ones a rollout plays, and when.
"""
