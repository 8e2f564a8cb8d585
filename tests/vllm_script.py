"""A short run on generated ALFWorld games with vLLM in the trainer's process; prints what its test checks, as JSON.

Its own process: vLLM binds memory, changes torch's threads and leaves torch.distributed initialised.
"""

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from datasets import Dataset

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer


def weights_in_vllm(trainer) -> dict[str, torch.Tensor]:
    worker = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker
    return dict(worker.model_runner.model.named_parameters())


def largest_difference(trainer) -> float:
    """Between the weights the trainer means (the adapter merged) and those in vLLM, over all of them."""
    model, theirs = trainer.model, weights_in_vllm(trainer)
    if hasattr(model, "peft_config"):
        model = copy.deepcopy(model).merge_and_unload()
    ours = dict(model.named_parameters())
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    worst = 0.0
    for name, weight in theirs.items():
        packed = next((packed for packed in parts if packed in name), None)
        names = [name.replace(packed, part) for part in parts[packed]] if packed else [name]
        expected = torch.cat([ours[n] for n in names])
        worst = max(worst, (weight[: len(expected)] - expected).abs().max().item())
    return worst


def main(folder: str, mode: str) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    games = Path(folder) / f"games-{rank}"  # the same on every rank, but two cannot write one folder
    generate_games(games, "train", 16, seed=0, size="tiny")
    manifest = Manifest.scan(games)
    peft_config = None
    if mode == "lora":
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    args = G2POConfig(
        f"{folder}/out",
        per_device_train_batch_size=16 // ranks,
        num_generations=8,
        steps_per_generation=2 if ranks == 1 else 1,
        max_turns=10,
        max_prompt_length=512,
        max_completion_length=24,
        history_length=2,
        max_steps=6 if ranks == 1 else 3,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_vllm=True,
        stop_sequences=["</action>"] if mode == "lora" else None,
        vllm_mode="colocate",
        num_environment_workers=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = G2POTrainer(
        str(tiny_model_path()),
        args,
        Dataset.from_list(manifest.rows()),
        None,
        partial(AlfworldEnvironment, manifest, hidden_actions=("help", "look", "inventory", "examine"), intro=False),
        ALFWORLD_COMPACT_PROMPT,
        peft_config=peft_config,
    )
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    counts, differences, endings = [], [], []
    generate = trainer.engine.generate

    def watched(prompts, sampling):
        counts.append(len(prompts))
        if len(differences) < len(trainer.state.log_history) + 1:
            differences.append(largest_difference(trainer))
        replies = generate(prompts, sampling)
        endings.extend(trainer.processing_class.decode(reply.ids)[-10:] for reply in replies)
        return replies

    trainer.engine.generate = watched
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    after = dict(trainer.model.named_parameters())
    result = {
        "logs": logs,
        "weight_differences": differences,
        "live_counts": counts,
        "endings": sorted(set(endings)),
        "base_change": max([(after[name] - weight).abs().max().item() for name, weight in base.items()], default=0),
    }
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
