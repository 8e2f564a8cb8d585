"""`make test-pretrained`: the model is fetched before its tests run, and a part that is left out is named."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("taught", [True, False])
def test_the_model_is_fetched_whenever_it_is_tested(tmp_path, taught):
    """Everything is installed, but the cache may have been deleted since; Treasure needs the cold start."""
    venv, log = tmp_path / "venv", tmp_path / "log"
    program(venv / "bin/python", f'echo "$*" >> {log}')
    for stamp in (".installed", ".installed-for-tests", ".installed-pretrained"):
        (venv / stamp).touch()
    start = tmp_path / "start"
    start.mkdir()
    if taught:
        (start / "teaching.json").touch()
    done = subprocess.run(
        ["make", f"VENV={venv}", f"VLLM_INSTALLED={tmp_path}/none", f"START={start}", "test-pretrained"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    fetch, tests, *treasure = log.read_text().splitlines()
    assert fetch == "-m g2po_recipes.smollm2" and "tests/teach/test_pretrained.py" in tests
    assert "treasure" not in tests
    long = "tests/teach/test_treasure.py tests/teach/test_treasure_agent.py"
    assert treasure == ([f"-m pytest {long} -m pretrained -o faulthandler_timeout=14400"] if taught else [])
    assert ("Treasure is left out" in done.stdout) == (not taught)
