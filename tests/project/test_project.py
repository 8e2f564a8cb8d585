"""The project: every package is in the wheel, every public name exists and loads no more than it needs."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import g2po_trl

ROOT = Path(__file__).parents[2]


SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_setup_cfg_names_every_package():
    folders = [line.split(" = ") for line in SETUP["options"]["package_dir"].split("\n") if line]
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in folders
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert {line for line in SETUP["options"]["packages"].split("\n") if line} == found


def test_the_wheel_has_every_file_of_its_folders():
    """Model cards, the notebook, configurations: tracked files that are no modules match package_data."""
    kinds = {pattern.strip().removeprefix("**/*") for pattern in SETUP["options.package_data"]["*"].split(",")}
    command = ["git", "ls-files", "g2po_trl", "envs", "recipes"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    files = [Path(line) for line in tracked if not line.startswith(("envs/starters/", "envs/coding/"))]
    assert files
    assert not [str(file) for file in files if file.suffix not in {".py", *kinds}]


def test_public_names_exist_and_others_do_not():
    assert all(getattr(g2po_trl, name).__doc__ for name in g2po_trl.__all__)
    assert not hasattr(g2po_trl, "TRPOTrainer")
    assert set(dir(g2po_trl)) == set(g2po_trl.__all__)


SPINNING = """
import importlib.abc, os, runpy, sys
sys.path.insert(0, "recipes")
class Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.exit(os.environ.get("OMP_WAIT_POLICY", "torch spins"))
sys.meta_path.insert(0, Torch())
runpy.run_path("recipes/train_alfworld.py")
"""


def test_idle_threads_do_not_spin_where_environments_play():
    """Read by OpenMP when torch is loaded; an evaluation on two cores took fifteen times the CPU time without it."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    run = subprocess.run([sys.executable, "-c", SPINNING], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.stderr.strip().endswith("passive"), run.stderr[-300:]
