"""The documentation says what the code does: fields, metrics, commands; and it builds."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import programs
import pytest
import yaml

import g2po_trl
from benchmarks.common import read_text
from g2po_trl.credit.estimators.registry import ESTIMATORS
from g2po_trl.runs.summary import format_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def generator(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_what_the_code_says():
    module = generator("make_reference")
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == module.page(), "run `python docs/make_reference.py`"
    page_of_commands = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page_of_commands.split() == module.cli_page().split(), "likewise; Python 3.13 sets other spaces"
    rows = [line for line in page.splitlines() if line.startswith("- `")]
    assert len(rows) > 40 and not [row for row in rows if row.endswith("): ")], "every field is explained"


def test_the_api_page_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:class|exception|function):: g2po_trl\.([\w.]+)", page, re.MULTILINE)
    assert sorted({*named, *ESTIMATORS}) == g2po_trl.__all__, "method.md has the estimators"
    assert len(re.findall(r"^\.\. auto", page, re.MULTILINE)) == len(named)


def test_the_method_page_has_every_estimator_with_its_options():
    """A row each: the paper's address, the name, and every option with its default."""
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    section = page.split("## Estimators\n")[1].split("\n## ")[0]
    rows = {re.search(r"`(\w+)` \|", row)[1]: row for row in section.splitlines() if re.match(r"\| .*`\w+` \|", row)}
    assert rows.keys() == ESTIMATORS.keys()
    for name, row in ESTIMATORS.items():
        assert row.paper is None or f"https://arxiv.org/abs/{row.paper})" in rows[name], name
        discounted = "yes" if row.uses_gamma else "own" if "gamma" in row.options else "no"
        assert f"| {discounted} |" in rows[name], name
        for option, default in row.options.items():
            if option != "episode_statistics":
                assert f"`{option}`" in rows[name] and (row.ablations or f"{default:g}" in rows[name]), (name, option)


@functools.cache
def help_of(*command):
    return programs.run(*command, "--help", cwd=ROOT, timeout=120).stdout


PROGRAM = r"(?:\bg2po [a-z]+|python -m (?:g2po_|benchmarks\.)\S+|recipes/\w+\.py)"
COMMANDS = sorted(
    {
        " ".join(found.split())
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
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


def test_the_recommended_settings_are_fields_and_what_they_call_the_papers_are_defaults():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    settings = re.findall(r"^(\w+): (\S+) *(?:# (?:as the paper|the paper: (\S+)).*)?$", block, re.MULTILINE)
    assert len(settings) == len(block.splitlines()) == 4
    for name, value, of_paper in settings:
        assert g2po_trl.G2POConfig.__dataclass_fields__[name].default == yaml.safe_load(of_paper or value), name


def test_the_tutorial_shows_what_was_recorded():
    """Its table is what a run prints of the recorded evaluations."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results" / "gpu" / "h200"
    findings = json.loads(read_text(results / "smollm2.json"))["parts"]["smollm2-g2po-seed100"]["findings"]
    played = [entry for entry in findings if entry.get("temperature") == 1.0]
    types = [{key.partition("/")[2]: value for key, value in entry.items() if "/" in key} for entry in played]
    before, *_, after = (
        {"success_rate": entry["panel"], "success_rate_by_type": by_type} for entry, by_type in zip(played, types)
    )
    assert format_table({"before": before, "after": after}) in page
    assert f"stopped after {findings[-1]['step']} of 60 iterations" in " ".join(page.split())
    taught = json.loads((results / "teaching-again.json").read_text())["exams"][-1]
    assert f"{taught['samples']} samples, {taught['seconds']:.0f} s, success {taught['success_rate']:.1%}" in page


def test_what_is_called_the_same_as_in_trl_has_the_same_default():
    from trl import GRPOConfig

    from g2po_trl.config_validation import inherited

    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    same = set(re.findall(r"`(\w+)`", re.search(r"\*\*The same\*\*(.*?)\n\n", page, re.DOTALL)[1]))
    theirs, ours = GRPOConfig.__dataclass_fields__, g2po_trl.G2POConfig.__dataclass_fields__
    options = {name for name in same if name in theirs}
    assert len(options) == len(same) - 4, "all but four arguments of the trainer"
    assert not [name for name in options if name in inherited("refused") or theirs[name].default != ours[name].default]
