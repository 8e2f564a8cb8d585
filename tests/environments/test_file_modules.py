"""Files of one name in two folders: each name means its own file, in this process and in workers."""

import importlib
import sys

import datasets  # noqa: F401  (imported here, since it cannot be imported twice)
import pytest

from g2po_trl import G2POError
from g2po_trl.environments.loading import load
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentPool

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


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two projects with the same names of files, of which each says whose it is."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    for who in ("a", "b"):
        folder = tmp_path / f"{who}.project%"
        for name, text in {
            "environment.py": GAME,
            "helpers.py": "from calculus.rules import WHO",
            "calculus/__init__.py": "",
            "calculus/rules.py": f"import calculus\nWHO = {who!r}",
            "words/more.py": "import helpers\nMORE = helpers.WHO",
            "data.txt": who,
            "experts.py": "import environment\nGame = environment.Game",
            "random.py": "from environment import Game\nfrom random import choice",
            "datasets.py": "from datasets import Dataset\nfrom environment import Game",
            "json.py": "raise RuntimeError('not the standard library')",
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    yield tmp_path / "a.project%", tmp_path / "b.project%"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_each_folder_has_its_own_modules_here_and_in_workers(folders):
    a, b = folders
    games = {"a": load(f"{a}/environment.py:Game"), "b": load(f"{b}/environment.py:Game")}
    assert load(f"{a}/experts.py:Game") is games["a"], "a file beside it is imported once"
    for who, game in reversed(games.items()):
        assert game().reset().text == f"{who} {who} {who} {who} {who} x"
        with EnvironmentPool(game, PoolLimits(1)) as pool:
            assert pool.reset([{}])[0].text == f"{who} {who} {who} {who} {who} x"
    assert "json.py" not in str(importlib.import_module("json").__file__)


@pytest.mark.parametrize("name", ["random", "datasets"])
def test_a_file_may_have_the_name_of_another_module(folders, name):
    for folder in folders:
        assert load(f"{folder}/{name}.py:Game") is load(f"{folder}/environment.py:Game")
    assert importlib.import_module(name).__file__ != str(folders[0] / f"{name}.py")


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbffrom g2po_trl import TextEnvironment\n\nclass Game(TextEnvironment): pass\n",
        b"# coding: latin-1\nfrom g2po_trl import TextEnvironment as Base\n\nclass Game(Base): '\xe9'\n",
        b"import g2po_trl as g\n\nclass Game(g.GymnasiumEnvironment): pass\n",
    ],
)
def test_the_environment_of_a_file_is_found_in_all_that_python_reads(tmp_path, text):
    (tmp_path / "only.py").write_bytes(text)
    assert load(f"{tmp_path}/only.py").__name__ == "Game"


@pytest.mark.parametrize("name", [".game:Game", "./game:Game", "game", ":Game"])
def test_a_name_of_no_module_is_refused(name):
    with pytest.raises(G2POError, match="name of an environment"):
        load(name)


def test_a_module_that_a_script_has_imported_is_not_imported_twice(folders):
    sys.path.insert(0, str(folders[0]))
    import environment

    assert load(f"{folders[0]}/environment.py:Game") is environment.Game
    assert load(f"{folders[1]}/environment.py:Game") is not environment.Game


def test_a_game_of_a_file_starts_processes_that_find_it(tmp_path):
    (tmp_path / "game.py").write_text(
        "import multiprocessing\n"
        "from g2po_trl import Observation, TextEnvironment\n\n\n"
        "def twice(number, results):\n"
        "    results.put(2 * number)\n\n\n"
        "class Game(TextEnvironment):\n"
        "    def reset(self):\n"
        "        context = multiprocessing.get_context('spawn')\n"
        "        results = context.Queue()\n"
        "        context.Process(target=twice, args=(4, results)).start()\n"
        "        return Observation(str(results.get(timeout=30)))\n"
    )
    with EnvironmentPool(load(f"{tmp_path}/game.py:Game"), PoolLimits(1)) as pool:
        assert pool.reset([{}])[0].text == "8"
