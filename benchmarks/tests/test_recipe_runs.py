"""Locks of runs."""

import pytest

from benchmarks.learning.recipe_runs import Busy, lock


def test_a_run_that_another_process_plays_is_busy(tmp_path):
    with lock(tmp_path / "lock"):
        with pytest.raises(Busy), lock(tmp_path / "lock"):
            pass
    with lock(tmp_path / "lock"):
        pass
