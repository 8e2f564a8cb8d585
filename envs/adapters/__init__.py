"""Adapters: environments of other libraries as `TextEnvironment`s, and the server of `g2po serve`."""
