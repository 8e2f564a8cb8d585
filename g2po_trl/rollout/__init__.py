"""Rollout: a task goes in, a trajectory comes out.

It imports `environments` alone, and knows no trainer, graph or update. It gives prompts and their encoding, engines
that answer them, and what plays many episodes at a time.
"""
