"""A benchmark runs as its first lines say, on the smallest of inputs, and its numbers fit together."""

import json
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_phases(tmp_path):
    options = ["--episodes", "8", "--repetitions", "1", "--max_tokens", "1024", "--threads", "1"]
    done = programs.run(ROOT / "benchmarks/phases.py", "--output", tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    positions = {layout: counted["positions"] for layout, counted in found["counts"].items()}
    assert positions["trl"] > positions["padded"] >= positions["packed"] > positions["shared"] > 0
    for layout, kinds in found["positions by kind"].items():
        assert sum(kinds.values()) == positions[layout] and min(kinds.values()) >= 0
    assert found["positions by kind"]["shared"]["repeated"] < found["positions by kind"]["packed"]["repeated"] / 2
    assert all(float(distance) < 1e-5 for distance in found["gradient, relative distance to padded"].values())
    assert 0 < found["prompt tokens that were tokenized"] < found["prompt tokens"] < found["tokens"]
    assert set(found["whole iterations"]["medians"]) >= {"generation", "update", "iteration"}
