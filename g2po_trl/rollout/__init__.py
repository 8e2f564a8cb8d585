"""Rollout: tasks in, trajectories out.

It imports `prompts`, `environments` and `engines`. `Player` plays many episodes concurrently; a strategy decides which
ones a rollout plays, and when.
"""
