"""The same panel, observations, keys and rewards whatever the number of workers, and the second time."""

import hashlib
from functools import partial
from pathlib import Path

import pytest
from refusals import refused

from g2po_envs.sokoban.games import level_rows
from g2po_envs.sokoban.panels import load_panel
from g2po_trl import EnvironmentPool, Observation, PoolLimits

APPWORLD = Path(__file__).parents[2] / ".venv-appworld"


def played(factory, rows, workers: int, actions=None, turns: int = 8) -> str:
    """Hash of all that is shown and paid in one episode of each row, played by a rule."""
    told = hashlib.sha256()
    with EnvironmentPool(factory, PoolLimits(workers, 900.0, 900.0)) as pool:
        seen = dict(enumerate(pool.reset(rows, range(len(rows)))))
        for turn in range(turns):
            assert all(isinstance(observation, Observation) for observation in seen.values()), seen
            told.update(repr(sorted(seen.items())).encode())
            choices = {slot: actions or seen[slot].admissible_actions for slot in seen}
            chosen = {slot: listed[(7 * turn + slot) % len(listed)] for slot, listed in choices.items()}
            results = pool.step(chosen) if chosen else {}
            told.update(repr([(slot, r.reward, r.terminated) for slot, r in sorted(results.items())]).encode())
            seen = {slot: result.observation for slot, result in results.items() if not result.terminated}
    return told.hexdigest()


def check(factory, rows, actions=None, turns=8):
    runs = [played(factory, rows, workers, actions, turns) for workers in (1, 2, 8, 2)]
    assert len(set(runs)) == 1
    assert played(factory, rows[::-1], 2, actions, turns) != runs[0], "the hash sees what was played"


def test_alfworld(tmp_path):
    pytest.importorskip("alfworld")
    from g2po_envs.alfworld import AlfworldEnvironment, generate_games

    panel = generate_games(tmp_path / "games", "held-out", 8, seed=5, size="tiny", num_workers=1, progress=False)
    check(partial(AlfworldEnvironment, panel), panel.rows())


def test_webshop():
    pytest.importorskip("thefuzz")
    from g2po_envs.webshop import ShopSource, WebshopEnvironment

    factory, rows = partial(WebshopEnvironment, ShopSource(products=60)), ShopSource(products=60).rows("held-out", 8)
    assert rows == ShopSource(products=60).rows("held-out", 8)
    check(factory, rows, ["search[soft towels]", "click[next >]", "click[b0]", "search[a]"])
    check(factory, rows)


def test_a_selection_that_means_other_tasks_is_refused():
    for field, options in (
        ("number", {"number": 0}),
        ("number", {"number": "2"}),
        ("skip", {"number": 3, "skip": -1}),
    ):
        with refused(field):
            load_panel(**options)
    panel = load_panel("medium", number=3, skip=2)
    assert [row["number"] for row in panel.rows] == [r["number"] for r in level_rows("medium", 5, held_out=True)][2:]
    assert "\nyou" in load_panel(number=2, compact=True).environment_factory().reset(number=0).text


@pytest.mark.appworld
@pytest.mark.skipif(not (APPWORLD / "root" / "data").exists(), reason="not set up here: `make test-appworld`")
def test_appworld():
    from g2po_envs.appworld import AppworldEnvironment, Installation

    installation = Installation(str(APPWORLD))
    rows = installation.rows("train") + installation.rows("dev")
    codes = ["x = 2", "print(apis.api_docs.show_app_descriptions())", "print(x)", "print(1 / 0)"]
    patient = {"start_timeout": 600.0, "call_timeout": 600.0}  # eight servers start at once, perhaps on a busy machine
    check(partial(AppworldEnvironment, installation, max_turns=3, **patient), rows, codes, turns=3)
