"""A benchmark runs as its first lines say, on the smallest of inputs, and its numbers fit together."""

import gzip
import inspect
import json
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import figures, train
from benchmarks.common import RESULTS, read_text
from benchmarks.credit import train_discounted
from benchmarks.faults import pool_faults
from benchmarks.learning import stages
from benchmarks.speed import (
    advantage_speed,
    against_trl,
    agent_iteration,
    agents,
    alfworld_pool,
    coding_agents,
    layouts,
)
from g2po_envs.alfworld import generate_games
from g2po_trl import G2POTrainer, read_jsonl

ROOT = Path(__file__).parents[2]


def results(folder, name="results.json"):
    return json.loads((folder / name).read_text())


def test_layouts(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(layouts, "BUDGETS", (2048,))
    for name in layouts.SAMPLES:
        lines = read_text(RESULTS / f"positions/{name}.jsonl.gz").splitlines()[:16]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    run_main(layouts, "--output", tmp_path, "--samples", 8, "--repetitions", 1)
    for name in layouts.SAMPLES:
        of = results(tmp_path)[name]
        assert set(of["CPU seconds"]) == {"tree", "padded", "trl", "floor"}
        assert all(distance < 1e-4 for distance in of["gradient, relative distance to padded"].values())
        counted = of["positions by budget"]["2048"]
        assert (
            of["different tokens"] <= counted["tree"] <= counted["async"] < counted["padded"] < of["positions of trl"]
        )
        assert min(of["memory, MiB"].values()) > 0


def test_against_trl(tmp_path, run_main):
    run_main(against_trl, "--output", tmp_path, "--repetitions", 1, "--groups", 1, "--turns", 1)
    of = results(tmp_path)["values"]
    assert of["g2po"]["environment steps"] == of["g2po"]["samples trained"] and of["trl"]["samples trained"] == [8]
    assert of["trl"]["tokens forwarded in update"] > of["g2po"]["tokens forwarded in update"]


def test_advantage_speed(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(advantage_speed, "SIZES", {"small": (2, 4, 64, 1, 1)})
    run_main(advantage_speed, "--output", tmp_path)
    assert results(tmp_path)["sizes"]["small"]["ours_seconds"][0] > 0


def test_agents(tmp_path, run_main):
    run_main(agents, "--output", tmp_path, "--episodes", 2, "--turns", 2, "--repetitions", 1, "--total", 2)
    found = results(tmp_path)
    assert len(found["rates"]) == 2 * len(agents.PROTOCOLS) and found["left"][0]["children"] == 0


def test_alfworld_pool(tmp_path, run_main):
    generate_games(tmp_path / "games", "train", 2, seed=0, size="tiny", progress=False)
    words = ["--games", tmp_path / "games", "--output", tmp_path, "--num_games", 2, "--episodes", 2, "--turns", 2]
    run_main(alfworld_pool, *words, "--stock_episodes", 1, "--resets", 2)
    assert results(tmp_path)["same_texts"], "the stock engine says the same"


def test_pool_faults(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(pool_faults, "seconds_a_turn", lambda: 0.2)
    run_main(pool_faults, "--output", tmp_path, "--limit", 0.5)
    for what, of in results(tmp_path)["8 episodes in one worker, one of them"].items():
        assert of["endings"]["ended"] == of["as undisturbed"] == 7, what


CLIENT = """#!{python}
import json, os, urllib.request
ask = {{"model": "m", "max_tokens": 9, "messages": [{{"role": "user", "content": "Fix the test"}}]}}
address, key = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", os.environ["ANTHROPIC_API_KEY"]
request = urllib.request.Request(address, json.dumps(ask).encode(), {{"x-api-key": key}})
print(json.load(urllib.request.urlopen(request)))
"""


def test_coding_agents(tmp_path, run_main, monkeypatch):
    """With a program that asks once in place of the client."""
    (tmp_path / "claude").write_text(CLIENT.format(python=sys.executable))
    os.chmod(tmp_path / "claude", 0o755)
    monkeypatch.setattr(tempfile, "tempdir", None)  # which the program sets
    monkeypatch.setattr(coding_agents, "SCRIPTS", {"fixes": [None], "fixes again": [None]})
    run_main(coding_agents, "--bin", tmp_path, "--clients", "claude", "--output", tmp_path)
    found = results(tmp_path, "coding_agents.json")["clients"]["claude"]
    assert [len(found[script]["steps"]) for script in ("fixes", "fixes again")] == [1, 1] and not found["left"]


def test_an_iteration_on_an_agent(tmp_path, run_main):
    """With a program that asks once in place of the client: rewards by chance, and each parameter moves or none."""
    (tmp_path / "claude").write_text(CLIENT.format(python=sys.executable))
    os.chmod(tmp_path / "claude", 0o755)
    tokenizer = ROOT / "envs" / "coding" / "model" / "tokenizer.json"
    run_main(agent_iteration, "claude", "--bin", tmp_path, "--tokenizer", tokenizer, "--output", tmp_path)
    found = results(tmp_path, "iteration_claude.json")
    assert found["moved"] in (0, found["parameters"]) and found["metrics"]["update/step_samples"] == 4


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.vllm
def test_streaming(tmp_path, run_main):
    from benchmarks.speed import streaming

    words = ["--output", tmp_path, "--episodes", 8, "--turns", 2, "--workers", 2, "--tokens", 8, "--seconds", 0.0]
    run_main(streaming, *words, "--repetitions", 1)
    assert results(tmp_path)["equal greedy trajectories"] == "8 of 8"


def test_an_arm_of_the_comparison_and_the_figures_of_its_run(tmp_path, games, run_main):
    """GRPO on the discounted reward: every step of a won episode has its group's standardised gamma^T R."""
    job = stages.smoke(stages.alfworld("main", "grpo discounted", 100))
    run_main(train_discounted, *job.words[1:], "--output_dir", tmp_path / "run", "--cache_dir", games)
    played = list(read_jsonl(tmp_path / "run/trajectories/train-000001.jsonl"))
    assert all(len({step.advantage for step in one.steps}) == 1 for one in played)
    run_main(figures, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run/figures").iterdir()} == {"learning_curve.png", "paper.png"}


def test_a_trainer_is_changed_while_it_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(G2POTrainer, "__init__", lambda self, model, args=None, **kwargs: made.append((model, args)))
    init = G2POTrainer.__init__
    monkeypatch.setattr(train.train, "main", lambda words: G2POTrainer("model", args=len(words)))
    train.run(["alfworld"], lambda given: given.update(args=given["args"] + 1), lambda trainer: made.append("made"))
    assert made == [("model", 2), "made"] and G2POTrainer.__init__ is init


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
