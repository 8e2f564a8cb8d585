"""Environments: the contract of an environment, its validation, tasks and loading.

`pool` runs environments in worker processes; `tools` wraps those in TRL's style. Only `prompts` and
`utils` are imported.
"""

from . import file_modules  # noqa: F401  (workers, which get classes of such modules, find them)
