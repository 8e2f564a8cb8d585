"""Rollout: plays tasks and returns trajectories.

It imports `environments` alone, and knows no trainer, graph or update. It gives prompts and their encoding, the
engines that generate, and the `Player` of many concurrent episodes.
"""
