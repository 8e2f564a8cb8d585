"""The house: which room may import which, no circles, small folders, and who inherits from a TRL trainer."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "g2po_trl"
DATA = {"utils", "trajectory", "prompts", "environments", "engines", "rollout", "credit"}
RUNS = DATA | {"runs"}
TRAINING = RUNS | {"config", "config_validation", "update", "trainer_validation"}
MAY_IMPORT = {
    "utils": set(),
    "trajectory": {"utils"},
    "prompts": {"utils"},
    "environments": {"utils", "prompts"},
    "agents": {"utils", "prompts", "environments"},
    "engines": {"utils"},
    "credit": {"utils", "trajectory"},
    "rollout": {"utils", "trajectory", "prompts", "environments", "engines"},
    "update": {"utils", "trajectory"},
    "runs": DATA,
    "config_validation": {"utils", "engines", "credit", "rollout", "update", "runs"},
    "config": {"utils", "engines", "environments", "credit", "rollout", "update", "config_validation"},
    "trainer_validation": TRAINING,
    "trainer": TRAINING,
    "ppo": TRAINING | {"trainer"},
    "report": {"utils", "trajectory", "credit", "runs", "check", "view"},
    "logs": {"utils", "trajectory", "prompts", "agents", "credit", "check", "view"},
    "evaluation": RUNS | {"agents"},
    "check": RUNS | {"evaluation", "view"},
    "teach": RUNS | {"check"},
    "estimate": {"utils"},
    "view": RUNS | {"agents"},
    "cli": RUNS
    | {"config", "config_validation", "trainer", "evaluation", "check", "teach", "estimate", "report", "logs", "view"},
}
MOST_FILES, MOST_MODULES_AT_THE_TOP = 13, 6


@pytest.fixture(scope="module")
def house():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_house
    finally:
        sys.path.pop(0)
    return make_house


def test_rooms_import_in_one_direction(house):
    for room, others in house.between_rooms().items():
        assert room in MAY_IMPORT, f"{room} is a new room: what may it import?"
        against = [line for other, lines in others.items() if other not in MAY_IMPORT[room] for line in lines]
        assert not against, f"{room} may not import: {'; '.join(against)}"


def test_no_modules_import_each_other_in_a_circle(house):
    assert not list(house.circles())


def test_folders_are_small():
    of_folder = Counter(path.parent for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
    assert max(of_folder.values()) <= MOST_FILES, of_folder.most_common(2)
    assert of_folder[PACKAGE] <= MOST_MODULES_AT_THE_TOP


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


def test_rooms_have_descriptions():
    for path in PACKAGE.rglob("__init__.py"):
        assert path.read_text().startswith('"""'), path
