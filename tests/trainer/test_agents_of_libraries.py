"""Agents as docs/agents.md writes them, with their libraries unchanged, train through `G2POTrainer`."""

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
from datasets import Dataset
from letter_trainer import make_config, played_in

from g2po_trl import G2POTrainer

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QUESTIONS = [{"question": f"{a}+1?", "answer": str(a + 1), "number": a} for a in range(1, 9)]


@pytest.fixture
def agent_file(tmp_path, monkeypatch):
    """Write the page's block with this text into a module; return its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text):
        (block,) = [block for block in BLOCKS if text in block]
        file = tmp_path / f"recipe_{len(block)}.py"
        file.write_text(block)
        return file

    return write


def train(agent, folder, model, **options):
    """Train two iterations and return the trajectories of both."""
    options |= {"max_steps": 2, "max_completion_length": 8, "max_prompt_length": 16384, "save_trajectories": True}
    trainer = G2POTrainer(str(model), make_config(folder, **options), Dataset.from_list(QUESTIONS), agent=agent)
    with closing(trainer):
        trainer.train()
    return played_in(trainer, 1) + played_in(trainer, 2)


@pytest.mark.slow
def test_the_openai_client(agent_file, tmp_path, tiny_model_dir):
    played = train(f"{agent_file('def guess')}:guess", tmp_path / "run", tiny_model_dir)
    assert len(played) == 16 and {t.outcome for t in played} <= {"success", "failure"}
    assert {len(t.steps) for t in played if t.outcome == "failure"} == {5}
    for trajectory in played:
        one, two = trajectory.steps[:2]
        begun = one.prompt_ids + one.completion_ids
        assert two.prompt_ids[: len(begun)] == begun


@pytest.mark.slow
def test_smolagents(agent_file, tmp_path, tiny_model_dir):
    """A random model writes no code; the agent asks again until it is out of turns."""
    pytest.importorskip("smolagents")
    small = {"per_device_train_batch_size": 2, "num_generations": 2, "max_turns": 2}
    played = train(f"{agent_file('smolagents')}:code", tmp_path / "run", tiny_model_dir, **small)
    assert len(played) == 4 and {len(t.steps) for t in played} == {2}
    assert {t.outcome for t in played} == {"truncated"}
    assert all(t.info["agent_error"].startswith("AgentGenerationError") for t in played)
