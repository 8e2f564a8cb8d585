"""The project: every package is in the wheel, every public name exists and loads no more than it needs."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

import g2po_trl

ROOT = Path(__file__).parents[1]


def test_setup_cfg_names_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = [line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line]
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in folders
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert {line for line in setup["options"]["packages"].split("\n") if line} == found


@pytest.mark.parametrize("name", g2po_trl.__all__)
def test_public_names_exist(name):
    assert getattr(g2po_trl, name).__doc__


def test_unknown_names_are_attribute_errors():
    assert not hasattr(g2po_trl, "TRPOTrainer")
    assert set(dir(g2po_trl)) == set(g2po_trl.__all__) == set(g2po_trl._MODULE_OF)


def test_graph_and_advantages_load_without_torch():
    code = "import sys; from g2po_trl import StateGraph, g2po; print({'torch', 'trl'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"
