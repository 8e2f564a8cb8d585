"""The house: who imports whom, who inherits from a TRL trainer, and a rollout without any trainer."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "g2po_trl"
MAY_IMPORT = {
    "environments": set(),
    "rollout": {"environments"},
    "credit": set(),
    "update": set(),
    "runs": {"environments", "rollout", "credit"},
    "agents": {"environments", "rollout", "runs"},
    "report": {"credit", "runs"},
    "view": {"environments", "rollout", "credit", "runs", "report"},
    "cli": {"environments", "runs", "check", "config", "evaluate", "switches"},
}


def make_house():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_house
    finally:
        sys.path.pop(0)
    return make_house


def test_rooms_import_in_one_direction():
    house = make_house()
    found = house.imports()
    assert found.keys() == MAY_IMPORT.keys(), "a new room needs a line here: what may it import?"
    for room, names in found.items():
        too_much = names - MAY_IMPORT[room] - set(house.BASE)
        assert not too_much, f"{room}/ imports {', '.join(sorted(too_much))}"


def test_an_import_in_the_wrong_direction_is_seen(tmp_path, monkeypatch):
    house = make_house()
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    for room in ("rollout", "runs"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text('"""A room."""\n')
    (tmp_path / "rollout" / "player.py").write_text(
        "from typing import TYPE_CHECKING\nfrom .loop import play\nfrom .. import trajectory\n"
        "if TYPE_CHECKING:\n    from ..credit.graph import StateGraph\n"
        "def card():\n    from ..runs.model_card import card\n"
    )
    assert house.imports() == {"rollout": {"trajectory", "runs"}, "runs": set()}


def test_two_classes_are_trls_trainers():
    trainers = [
        line for path in PACKAGE.rglob("*.py") for line in re.findall(r"^class .*Trainer\):", path.read_text(), re.M)
    ]
    assert sorted(trainers) == ["class G2POTrainer(GRPOTrainer):", "class PPOTrainer(G2POTrainer):"]


def test_the_drawing_of_the_house_is_current():
    drawn = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_house.py"), "--check"], capture_output=True, text=True
    )
    assert drawn.returncode == 0, drawn.stderr


def test_rooms_say_what_they_are_for():
    for room in MAY_IMPORT:
        assert (PACKAGE / room / "__init__.py").read_text().startswith('"""'), room
