"""The recipe and the Hub: pushed with its card, refused, and out of reach."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from fake_hub import fake_hub

pytestmark = pytest.mark.slow  # three runs of the recipe

ROOT = Path(__file__).parents[2]


def run_recipe(folder, endpoint, *flags):
    return subprocess.run(
        [sys.executable, ROOT / "recipes" / "train_alfworld.py", "--output_dir", folder / "agent"]
        + ["--cache_dir", folder / "games", "--num_games", "8", "--num_eval_games", "4", "--max_steps", "2"]
        + ["--per_device_train_batch_size", "8", "--num_generations", "4", "--max_turns", "4"]
        + ["--push_to_hub", "--hub_token", "hf_none", "--save_steps", "1", "--save_strategy", "steps", *flags],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,  # half a minute; only a hang is longer
    )


def test_pushed_with_its_card(tmp_path):
    with fake_hub() as hub:
        run = run_recipe(tmp_path, hub.endpoint, "--hub_model_id", "agent", "--hub_strategy", "all_checkpoints")
        assert run.returncode == 0, run.stderr[-3000:]
        card = hub.files["README.md"].decode()
        checkpoints = {f"checkpoint-{step}/model.safetensors" for step in (1, 2)}
        assert {"tokenizer.json", "config.json", "evaluations.jsonl", "run.json", *checkpoints} <= set(hub.files)
        kept = re.compile("(trajectories|unfinished|panels).*|.*training_args.bin")
        assert not list(filter(kept.fullmatch, hub.files))
        assert hub.commits[-1] == "End of training" and len(hub.commits) >= 2, "also while it trained"
        assert hub.files["model.safetensors"] == (tmp_path / "agent" / "model.safetensors").read_bytes()
    said = ["AlfworldEnvironment", "manifest", "Advantages: `g2po`", "success: all", "before", "2606.22995"]
    said += ["| learning_rate | 0.0003 |", "trl 1.", "transformers", "success: pick", 'load_agent("someone/agent")']
    assert all(text in card for text in said), card


@pytest.mark.parametrize("status", [401, None])
def test_a_hub_that_refuses_or_does_not_answer_stops_the_run_before_it_works(tmp_path, status):
    with fake_hub(status=status or 200) as hub:
        run = run_recipe(tmp_path, hub.endpoint if status else "http://127.0.0.1:9")
    assert run.returncode == 1 and "the Hub rejects" in run.stderr and "hf auth login" in run.stderr
    assert "iteration" not in run.stdout
