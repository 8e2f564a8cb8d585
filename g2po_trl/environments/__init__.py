"""Environments: the contract of an environment, its validation, tasks and loading.

`pool` runs environments in worker processes; `tools` wraps those in TRL's style.
"""
