"""An evaluation's numbers belong to the environment's code, wherever it is."""

import sys
from functools import partial

import pytest

from g2po_trl import PromptTemplate, ToolEnvironment
from g2po_trl.environments.adapters.gymnasium import GymnasiumEnvironment
from g2po_trl.environments.adapters.openenv import RemoteEnvironment
from g2po_trl.evaluation.fingerprint import fingerprint_code, fingerprint_prompt
from g2po_trl.runs.run_json import load_object

GAME = "class Game: ...\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, **files):
    """`write(folder, a__b="…")` writes a/b.py, and makes `a` a package."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        path.write_text(text)


def changes_with(folder, factory, file) -> bool:
    before = fingerprint_code(factory)
    assert fingerprint_code(factory) == before
    path = folder / file
    text = path.read_text()
    path.write_text(text + "# another one\n")
    changed = fingerprint_code(factory) != before
    path.write_text(text)
    assert fingerprint_code(factory) == before
    return changed


def test_a_package_as_a_whole_and_what_it_imports(folder):
    write(
        folder,
        fp_game__envs__game="from fp_game.core.rules import PAYS\n" + GAME,
        fp_game__core__rules="import fp_words\nPAYS = 1.0\n",
        fp_words="from fp_deeper import letters\n",
        fp_deeper__letters="",
        fp_unrelated="",
    )
    game = load_object({"import": "fp_game.envs.game:Game", "kwargs": {"size": 3}})
    for file in ("fp_game/envs/game.py", "fp_game/core/rules.py", "fp_words.py", "fp_deeper/letters.py"):
        assert changes_with(folder, game, file), file
    assert not changes_with(folder, game, "fp_unrelated.py")


def test_the_game_behind_an_adapter(folder):
    register = "register(id='G-v0', entry_point='fp_rules:Game')\n"
    write(folder, fp_gym=register, fp_rules=GAME, fp_inner=GAME)
    game = partial(GymnasiumEnvironment, env_id="fp_gym:G-v0", any_text=True)
    assert changes_with(folder, game, "fp_gym.py") and changes_with(folder, game, "fp_rules.py")
    assert not changes_with(folder, game, "fp_inner.py")
    inner = load_object({"import": "fp_inner:Game"})
    for named in (inner, "fp_inner:Game", partial(inner, 3)):
        assert changes_with(folder, partial(ToolEnvironment, named), "fp_inner.py")
    fingerprint_code(partial(RemoteEnvironment, ["http://127.0.0.1:8000"]))  # a server's code is not seen


def test_the_adapters_library_is_no_part_of_it():
    assert fingerprint_code(partial(GymnasiumEnvironment, "FrozenLake-v1")) == fingerprint_code(GymnasiumEnvironment)


@pytest.mark.parametrize("what", ["parse_completion", "show_observation", "class"])
def test_a_prompts_own_code_with_what_it_imports(folder, what):
    code = "import fp_reading\nfrom g2po_trl import PromptTemplate\n\nclass Own(PromptTemplate): ...\n"
    write(folder, fp_prompt=f"{code}def read(completion, prompt_end=''): ...\n", fp_reading="")
    read, own = (load_object({"import": f"fp_prompt:{name}"}) for name in ("read", "Own"))
    template = own("{observation}", "x") if what == "class" else PromptTemplate("{observation}", "x", **{what: read})
    before = fingerprint_prompt(template)
    (folder / "fp_reading.py").write_text("# otherwise\n")
    assert fingerprint_prompt(template) != before
    assert fingerprint_prompt(PromptTemplate("a", "b")) != fingerprint_prompt(PromptTemplate("a", "c"))
