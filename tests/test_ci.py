"""`make test-pretrained` and `.ci/run`: tests with a pretrained model are not skipped unnoticed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
    assert fetch == "-m g2po_envs.smollm2" and tests.startswith("-m pytest tests/test_pretrained.py")
    assert "treasure" not in tests
    assert treasure == (["-m pytest tests/test_treasure.py -m pretrained"] if taught else [])
    assert ("Treasure is left out" in done.stdout) == (not taught)


@pytest.mark.parametrize(
    "in_cache, code, tested",
    [("return '/model'", 0, True), ("return None", 0, False), ("raise ImportError('torch')", 1, False)],
)
def test_ci_tells_an_empty_cache_from_an_error(tmp_path, in_cache, code, tested):
    package, log = tmp_path / "modules/g2po_envs", tmp_path / "log"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "smollm2.py").write_text(f"def smollm2_in_cache():\n    {in_cache}\n")
    program(
        tmp_path / ".venv/bin/python",
        f'case "$*" in *trl_versions*) echo 1.16.0 1.16.0;; *"version("*) echo 1.16.0;; '
        f'*) PYTHONPATH={package.parent} exec {sys.executable} -S "$@";; esac',
    )
    for name in ("make", "chromium", "chromedriver"):
        program(tmp_path / "bin" / name, f'echo "{name} $*" >> {log}')
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([tmp_path / ".ci/run"], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("make test-pretrained" in log.read_text().splitlines()) == tested
    assert ("SmolLM2 is not in the cache" in done.stdout) == (not tested and not code)
