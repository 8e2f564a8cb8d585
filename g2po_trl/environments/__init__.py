"""Environments: the contract of an environment, and the worker processes that run environments.

It imports no other room. It gives `TextEnvironment`, `Observation`, `StepResult`, `ToolEnvironment`,
`EnvironmentPool`, the adapters for other libraries, and the checks made before an environment is played.
"""
