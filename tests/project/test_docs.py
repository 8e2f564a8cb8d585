"""The documentation says what the code does: fields, metrics, commands; and it builds."""

import functools
import re
import runpy
from pathlib import Path

import programs
import pytest
from trl import GRPOConfig

import g2po_trl
from g2po_trl.config_validation import inherited
from g2po_trl.credit.estimators.registry import ESTIMATORS

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


def test_the_generated_pages_are_what_the_code_says():
    make = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    page = PAGES["configuration.md"]
    assert page == make["page"](), "run `python docs/make_reference.py`"
    assert PAGES["cli.md"].split() == make["cli_page"]().split(), "likewise; Python 3.13 sets other spaces"
    rows = [line for line in page.splitlines() if line.startswith("- `")]
    assert len(rows) > 40 and not [row for row in rows if row.endswith("): ")], "every field is explained"


def test_the_api_page_has_every_public_name_once():
    named = re.findall(r"^\.\. auto\w+:: g2po_trl\.([\w.]+)", PAGES["api.md"], re.MULTILINE)
    assert len(named) == len(set(named)) and sorted({*named, *ESTIMATORS}) == g2po_trl.__all__
    assert not [name for name in ESTIMATORS if f"| `{name}` |" not in PAGES["method.md"]], "which has the estimators"


@functools.cache
def help_of(*command):
    return programs.run(*command, "--help", cwd=ROOT, timeout=120).stdout


PROGRAM = r"(?:\bg2po [a-z]+|python -m (?:g2po_|benchmarks\.)\S+|recipes/\w+\.py)"
COMMANDS = sorted(
    {
        " ".join(found.split())
        for page in PAGES.values()
        for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
        for line in re.sub(r"\\\n", " ", block).splitlines()
        for found in re.findall(rf"({PROGRAM}[^#|&]*)", line)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_flags_exist(command):
    words = command.split()
    target = words[1:3] if words[0] == "python" else words[:1]
    if words[0] == "g2po":
        target = ["-m", "g2po_trl.__main__", words[1]]
    text = help_of(*target)
    if words[:2] == ["g2po", "train"]:  # a recipe takes the flags that its own help does not show
        text += help_of("recipes/train_alfworld.py")
    assert "usage" in text
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        assert flag in text or flag == "--config", f"{' '.join(target)} has no {flag}"


def test_what_is_called_the_same_as_in_trl_has_the_same_default():
    (listed,) = re.findall(r"\*\*The same\*\*(.*?)\n\n", PAGES["from_trl.md"], re.DOTALL)
    same = set(re.findall(r"`(\w+)`", listed))
    theirs, ours = GRPOConfig.__dataclass_fields__, g2po_trl.G2POConfig.__dataclass_fields__
    options = {name for name in same if name in theirs}
    assert len(options) == len(same) - 4, "all but four arguments of the trainer"
    assert not [name for name in options if name in inherited("refused") or theirs[name].default != ours[name].default]
