"""Environments: the contract a user writes, and the worker processes that host what he wrote.

It imports no other room. It gives `TextEnvironment`, `Observation`, `StepResult`, `ToolEnvironment`, `EnvironmentPool`
and the checks that both training and `python -m g2po_trl.check` make before an environment is played.
"""
