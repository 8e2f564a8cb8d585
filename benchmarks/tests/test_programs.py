"""A benchmark runs as its first lines say, on the smallest of inputs, and its numbers fit together."""

import inspect
import json
import re
import shutil
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_phases(tmp_path):
    options = ["--episodes", "8", "--repetitions", "1", "--max_tokens", "1024", "--threads", "1"]
    done = programs.run("-m", "benchmarks.speed.phases", "--output", tmp_path, *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    positions = {layout: counted["positions"] for layout, counted in found["counts"].items()}
    assert positions["trl"] > positions["padded"] > positions["shared"] > 0
    kinds_of = found["positions by kind"]
    for layout, kinds in kinds_of.items():
        assert sum(kinds.values()) == positions[layout] and min(kinds.values()) >= 0
    tokens = {layout: positions[layout] - kinds["padding"] for layout, kinds in kinds_of.items()}
    assert tokens["trl"] == tokens["padded"]
    assert kinds_of["shared"]["repeated"] < kinds_of["padded"]["repeated"] / 2
    assert all(float(distance) < 1e-5 for distance in found["gradient, relative distance to padded"].values())
    assert 0 < found["prompt tokens"] < found["tokens"]
    assert set(found["whole iterations"]["medians"]) >= {"generation", "update", "iteration"}


@pytest.mark.slow
def test_positions(tmp_path):
    """Also against another checkout, here the same."""
    for name in ("windows", "conversations"):
        shutil.copy(ROOT / f"benchmarks/results/positions/{name}.jsonl.gz", tmp_path)
    options = ["--samples", "8", "--repetitions", "1", "--before", ROOT]
    done = programs.run("-m", "benchmarks.speed.positions", "--output", tmp_path, *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    for name in ("windows", "conversations"):
        of = found[name]
        assert set(of["CPU seconds"]) == {"tree", "before", "padded", "trl", "floor"}
        assert all(distance < 1e-4 for distance in of["gradient, relative distance to padded"].values())
        for counted in of["positions by budget"].values():
            assert of["different tokens"] <= counted["tree"] == counted["before"]
            assert counted["tree"] <= counted["async"] < counted["padded"]
        assert min(of["memory, MiB"].values()) > 0


def test_programs_use_what_a_trainer_has():
    """Few of them run in the tests."""
    from g2po_trl import PPOTrainer

    classes = [of for of in PPOTrainer.__mro__ if of.__module__ != "builtins"]
    known = set(dir(PPOTrainer)) | set(re.findall(r"self\.(\w+)", "".join(map(inspect.getsource, classes))))
    for path in (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("recipes/*.py"), *ROOT.glob("tests/*.py")):
        used = set(re.findall(r"(?<![\w./\"'])trainer\.(\w+)", path.read_text())) - {"py"}
        if path.name != "test_elsewhere.py":  # other frameworks'
            assert used <= known, f"{path.name} uses {', '.join(sorted(used - known))} of a trainer"


def test_programs_that_pages_and_docstrings_name_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *ROOT.glob("docs/*.md")]
    pages += [ROOT / "benchmarks/README.md", *ROOT.glob("benchmarks/**/*.py")]  # results name the commit of theirs
    named = {name for page in pages for name in re.findall(r"-m (benchmarks\.[\w.]*\w)", page.read_text("utf-8"))}
    assert len(named) > 10
    missing = [name for name in named if not (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()]
    assert not missing
