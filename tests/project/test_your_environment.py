"""docs/your_environment.md: every command of the page, in the page's order, with a small model and few steps."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import fake_hub

PAGE = (Path(__file__).parents[2] / "docs" / "your_environment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.partition("  #")[0].rstrip() for block in BLOCKS for line in block.splitlines()]
FLAGS = {
    "train": "--max_steps 1 --max_completion_length 4 --max_turns 2 --num_environment_workers 1 --num_eval_tasks 2 "
    "--per_device_train_batch_size 8",
    "teach": "--max_steps 1 --num_episodes 8 --num_validation_episodes 2 --num_environment_workers 1",
    "evaluate": "--limit 2 --max-turns 2 --max-completion-length 4 --num-environment-workers 1",
    "view": "--no-open",
}


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, tiny_model_dir):
    folder, outputs = tmp_path, {}
    with fake_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_of_a_test"}
        for line in COMMANDS:
            words = [str(tiny_model_dir) if word.startswith("Qwen/") else word for word in shlex.split(line)]
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            words += FLAGS.get(words[1], "").split()
            command = [sys.executable, "-m", "g2po_trl", *words[1:]]
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
            assert run.returncode == 0, f"{line}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
            outputs[line] = run.stdout
        assert any(name.endswith("model.safetensors") for name in hub.files), hub.files.keys()
    assert "iteration   1/1" in outputs["g2po train --model runs/tidy-start"] and "ok " in outputs["g2po check"]
    assert (folder / "runs" / "tidy" / "view.html").is_file()
    assert "8 of 8 demonstrations succeed" in outputs["g2po teach"]
