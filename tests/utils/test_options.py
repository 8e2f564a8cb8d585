"""Options check themselves by what their fields declare."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from refusals import refused

from g2po_trl.utils.options import Options, as_mapping, option, without_effect


@dataclass
class Game(Options):
    size: int = option("Cells.", 3, within="[1, inf)")
    rate: float | None = option("Share.", None, within="(0, 1]")
    kind: str = option("Kind.", "maze", choices=("maze", "grid"))
    names: list[str] | None = option("Names.", None, choices=("a", "b"))
    folder: Path | None = option("Where.", None)
    more: dict | str | None = option("Anything.", None)
    door: int = option("Doors.", 0)


EXCLUDED = {
    "size": [0, np.int64(2), 1.5, True, None, float("inf")],
    "rate": [0, 1.01, "0.5", float("nan")],
    "kind": ["plain", None, ["maze"]],
    "names": ["a", ["c"]],
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_a_value_that_its_field_excludes_is_refused(name):
    for value in EXCLUDED[name]:
        with refused(name):
            Game(**{name: value})


def test_other_values_are_taken():
    Game(size=1, rate=1, kind="grid", names=["b", "a"], folder=Path("x"), more={"a": 1})
    assert Game(folder="x").folder == "x", "of a kind that is not checked"


def test_an_object_may_be_any_mapping():
    assert as_mapping("more", MappingProxyType({"a": 1})) == as_mapping("more", '{"a": 1}') == {"a": 1}
    assert as_mapping("more", {}) is as_mapping("more", "null") is None


def test_an_option_without_its_condition_has_no_effect():
    needs = {"door": "kind=maze|rate"}
    for game, told in ((Game(kind="grid"), 1), (Game(kind="grid", rate=0.5), 0), (Game(), 0)):
        assert len(list(without_effect(["door", "size"], vars(game), needs))) == told
