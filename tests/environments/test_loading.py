"""Files by their path: imported here and in workers, with what is next to them, whatever they are called."""

import importlib
import sys

import pytest
from refusals import refused

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.environments.loading import load

GAME = """
from pathlib import Path

import calculus.rules, json, random
import helpers
from words.more import MORE
from g2po_trl import Observation, TextEnvironment


class Game(TextEnvironment):
    def reset(self):
        import helpers as later
        data = Path(__file__).with_name("data.txt").read_text()
        return Observation(" ".join([helpers.WHO, later.WHO, calculus.rules.WHO, MORE, data, random.choice("x")]))
"""
FILES = {
    "environment.py": GAME,
    "helpers.py": "from calculus.rules import WHO",
    "calculus/__init__.py": "",
    "calculus/rules.py": "import calculus\nWHO = 'a'",
    "words/more.py": "import helpers\nMORE = helpers.WHO",
    "data.txt": "a",
    "random.py": GAME,
    "json.py": "raise RuntimeError('not the standard library')",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "project%" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project%" / name).write_text(text)
    return tmp_path / "project%"


def test_a_file_and_its_neighbours_are_imported_here_and_in_workers(folder):
    """Next to it may be files that are called like installed packages."""
    game = load(f"{folder}/environment.py:Game")
    assert load(f"{folder}/environment.py:Game") is game and game().reset().text == "a a a a a x"
    with EnvironmentPool(game, PoolLimits(1)) as pool:
        assert pool.reset([{}])[0].text == "a a a a a x"
    with refused("environment"):
        load(f"{folder}/random.py:Game")
    assert str(folder) not in importlib.import_module("random").__file__


def test_files_of_one_name_in_two_folders_are_refused(folder, tmp_path):
    load(f"{folder}/environment.py:Game")
    for name in ("environment", "helpers"):  # `import helpers` would give another folder's
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(GAME)
        (tmp_path / name / "other.py").write_text(GAME)
        with refused("environment"):
            load(f"{tmp_path}/{name}/other.py:Game")


@pytest.mark.parametrize("head", ["class Game(TextEnvironment)", "class Game"])
def test_the_environment_of_a_file_is_found(tmp_path, head):
    methods = "    def reset(self): pass\n    def get_reward(self): pass\n"
    (tmp_path / "only.py").write_text(f"from g2po_trl import TextEnvironment\n\n{head}:\n{methods}")
    assert load(f"{tmp_path}/only.py").__name__ == "Game"


@pytest.mark.parametrize("text", ["import no_such_module", "def broken(:", "one = 1", None])
def test_a_file_that_cannot_be_imported_or_has_no_environment_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    with refused("environment"):
        load(f"{tmp_path}/bad.py")
    assert "bad" not in sys.modules or text == "one = 1"


@pytest.mark.parametrize("name", ["./game:Game", "game", ":Game", "json:Game", "no.such.module:Game"])
def test_a_name_of_no_object_is_refused(name):
    with refused("environment"):
        load(name)
