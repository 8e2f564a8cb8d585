"""Treasure, learned by a pretrained model from the cold start that `make train-pretrained` makes."""

import re
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
import torch
from datasets import Dataset

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT
from g2po_trl import G2POConfig, G2POTrainer

ROOT = Path(__file__).parents[2]
START = ROOT / "runs/alfworld-smollm2-start"
IS_THERE = (START / "teaching.json").is_file()
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not IS_THERE, reason="no cold start; `make train-pretrained` makes it"),
]


def test_treasure_is_learned_from_the_cold_start(tmp_path, monkeypatch):
    """In over 80 % of the episodes; turning at random finds it in 48 %, always going right in 60 %.

    No rule for a room alone finds it in more than 68 %: what came before must be remembered. Little more
    than an hour on one core with vLLM, longer without.
    """
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/your_environment.md").read_text(), re.DOTALL)
    (tmp_path / "treasure.py").write_text(script)
    tasks, num_generations, slices = Dataset.from_dict({"treasure": [1, 2, 5, 6, 7]}), 16, 5
    args = G2POConfig(
        str(tmp_path / "run"), per_device_train_batch_size=len(tasks) * num_generations // slices,
        steps_per_generation=slices, num_generations=num_generations, num_generations_eval=num_generations,
        per_device_eval_batch_size=len(tasks) * num_generations, max_turns=10, max_completion_length=20,
        stop_sequences=["</action>"], max_tokens_per_micro_batch=1024, gradient_checkpointing=False,
        max_steps=40 * slices, learning_rate=1e-5, lr_scheduler_type="constant", gamma=1.0, beta=0.0, bf16=True,
        use_cpu=not torch.cuda.is_available(), use_vllm=find_spec("vllm") is not None, eval_temperature=1.0,
        save_strategy="no", report_to="none", num_environment_workers=1,
    )  # fmt: skip
    game = run_path(str(tmp_path / "treasure.py"))["Treasure"]
    options = {"environment_factory": game, "prompt_template": ALFWORLD_COMPACT_PROMPT}
    trainer = G2POTrainer(str(START), args, tasks, tasks, **options)
    before = trainer.evaluate()["eval_success_rate"]
    trainer.train()
    after = trainer.evaluate()["eval_success_rate"]
    trainer.close()
    assert before < 0.7 and after > 0.8, (before, after)
