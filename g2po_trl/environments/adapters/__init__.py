"""Adapters: environments of other libraries as `TextEnvironment`s."""
