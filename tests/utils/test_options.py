"""Options check themselves by what their fields declare."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from g2po_trl import G2POError
from g2po_trl.utils.options import Options, option, without_effect


@dataclass
class Game(Options):
    size: int = option("Cells.", 3, within="[1, inf)")
    rate: float | None = option("Share.", None, within="(0, 1]")
    kind: str = option("Kind.", "maze", choices=("maze", "grid"))
    names: list[str] | None = option("Names.", None, choices=("a", "b"))
    folder: Path | None = option("Where.", None)
    more: dict | str | None = option("Anything.", None)
    door: int = option("Doors.", 0, needs="kind=maze|rate")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size", 0), ("size", 1.5), ("size", True), ("size", None), ("size", float("inf"))),
        *(("rate", 0), ("rate", 1.01), ("rate", "0.5"), ("rate", float("nan"))),
        *(("kind", "plain"), ("kind", None), ("kind", ["maze"]), ("names", "a"), ("names", ["c"])),
    ],
)
def test_a_value_that_its_field_excludes_is_refused(name, value):
    with pytest.raises(G2POError, match=f"^{name} is "):
        Game(**{name: value})


def test_other_values_are_taken():
    Game(size=1, rate=1, kind="grid", names=["b", "a"], folder=Path("x"), more={"a": 1})
    assert Game(folder="x").folder == "x", "of a kind that is not checked"


def test_an_option_without_its_condition_has_no_effect():
    needs = {one.name: one.metadata["needs"] for one in fields(Game) if one.metadata["needs"]}
    for game, told in ((Game(kind="grid"), 1), (Game(kind="grid", rate=0.5), 0), (Game(), 0)):
        assert len(list(without_effect(["door", "size"], vars(game), needs))) == told


def test_other_parsers_see_the_help_alone():
    assert dict(fields(Game)[0].metadata) == {"help": "Cells."}
