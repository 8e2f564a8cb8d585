"""Rollout: tasks in, trajectories out.

`Player` plays many episodes concurrently; a strategy decides which ones a rollout plays, and when.
"""
