"""Mark of tests that need DeepSpeed."""

import importlib.util

import pytest

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-deepspeed` brings its own",
)
