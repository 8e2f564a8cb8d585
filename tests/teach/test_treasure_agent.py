"""Treasure as a tool-calling agent: `g2po teach` makes the start, and G2PO learns the way from it."""

import json
from importlib.util import find_spec
from pathlib import Path

import programs
import pytest
import torch

from g2po_recipes.smollm2 import smollm2_in_cache

ROOT = Path(__file__).parents[2]
AGENT, CONFIG = (Path(__file__).with_name(f"treasure_agent.{kind}") for kind in ("py", "yaml"))
TEACH = (
    "--num_validation_tasks 0 --num_episodes 80 --num_demonstrations 150 --validation_steps 100 "
    "--num_validation_episodes 20 --per_device_train_batch_size 2 --learning_rate 2e-4 --warmup_steps 2 "
    "--save_strategy no"
).split()
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(smollm2_in_cache() is None, reason="SmolLM2 is not here; `make test-pretrained` fetches it"),
]


def test_an_agent_is_taught_its_calls_and_learns_the_way(tmp_path, monkeypatch):
    """Found in over 80 % of the episodes, of which turning at random finds 48 % and always going right 60 %."""
    import trl

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5_training.jinja"  # SmolLM2's own knows no tools
    start, run = tmp_path / "start", tmp_path / "run"
    agent = ["--agent", str(AGENT)]
    g2po("teach", *agent, "--train_config", CONFIG, "--chat_template", template, "--output_dir", start, *TEACH)
    (taught,) = json.loads((start / "teaching.json").read_text())["validations"]
    assert taught["valid_action_ratio"] >= 0.95 and taught["success_rate"] < 0.8, taught
    engine = "true" if find_spec("vllm") is not None else "false"
    cpu = "false" if torch.cuda.is_available() else "true"
    options = ["--config", CONFIG, "--model", start, "--output_dir", run, "--use_vllm", engine, "--use_cpu", cpu]
    g2po("train", *agent, *options)
    successes = [json.loads(line)["success_rate"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert successes[0] < 0.8 < successes[-1], successes


def g2po(*words):
    done = programs.run("-m", "g2po_trl", *map(str, words), cwd=ROOT, timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
