"""A short run on generated ALFWorld games with vLLM in the trainer's process; prints what its test checks, as JSON.

Its own process: vLLM binds memory, changes torch's threads and leaves torch.distributed initialised.
"""

import copy
import json
import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from datasets import Dataset
from letter_trainer import make_config
from peft import LoraConfig

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POTrainer

OPTIONS = {
    **{"num_generations": 8, "max_turns": 10, "max_prompt_length": 512, "max_completion_length": 24},
    **{"history_length": 2, "lr_scheduler_type": "constant", "engine": "vllm", "vllm_mode": "colocate"},
    **{"dataloader_pin_memory": False, "disable_tqdm": True, "seed": 42},
}


def worker_of(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker


def serves_adapter(trainer) -> bool:
    adapter = trainer.player.actor.engine.adapter
    return adapter is not None and not adapter.merges


def largest_difference(trainer) -> float:
    """Between the weights the trainer means (an adapter merged, if not served) and those in vLLM, over all of them."""
    model, theirs = trainer.model, dict(worker_of(trainer).model_runner.model.named_parameters())
    if hasattr(model, "peft_config"):
        model = copy.deepcopy(model)
        model = model.unload() if serves_adapter(trainer) else model.merge_and_unload()
    ours = dict(model.named_parameters())
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    worst = 0.0
    for name, weight in theirs.items():
        name = name.replace(".base_layer", "")
        packed = next((packed for packed in parts if packed in name), None)
        names = [name.replace(packed, part) for part in parts[packed]] if packed else [name]
        expected = torch.cat([ours[n] for n in names])
        worst = max(worst, (weight[: len(expected)] - expected).abs().max().item())
    return worst


def watch_rollouts(trainer, opened_with) -> None:
    """Call `opened_with()` once a rollout, within it; `rollout` may be entered again there."""
    engine = trainer.player.actor.engine
    opened = engine._open

    @contextmanager
    def watched():
        with opened():
            opened_with()
            yield

    engine._open = watched


def logs_of(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]


def make_trainer(folder, mode: str, rank: int, ranks: int, **options):
    games = Path(folder) / f"games-{rank}"  # the same on every rank, but two cannot write one folder
    generate_games(games, "train", 16, seed=0, size="tiny")
    manifest = Manifest.scan(games)
    several = {"steps_per_generation": 2, "max_steps": 6} if ranks == 1 else {"max_steps": 3}
    defaults = {**OPTIONS, "per_device_train_batch_size": 16 // ranks, **several}
    hidden = ("help", "look", "inventory", "examine")
    environment = partial(AlfworldEnvironment, manifest, hidden_actions=hidden, intro=False)
    others = {"environment_factory": environment, "prompt_template": ALFWORLD_COMPACT_PROMPT}
    if mode == "lora" or "adapter" in mode:
        modules = ["q_proj", "v_proj", "down_proj"]
        others["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules=modules)
    if mode == "lora":
        defaults["stop_sequences"] = ["</action>"]
    if mode == "adapter":
        defaults["engine_kwargs"] = {"merge_adapter": False}
    args, tasks = make_config(f"{folder}/out", **{**defaults, **options}), Dataset.from_list(manifest.rows())
    return G2POTrainer(str(tiny_model_path()), args, tasks, tasks.select(range(4)), **others)


def train(folder: str, mode: str, rank: int, ranks: int) -> dict:
    trainer = make_trainer(folder, mode, rank, ranks)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    counts, differences, endings = [], [], set()
    engine = trainer.player.actor.engine
    submit, read = engine.submit, engine._read
    assert trainer.player.streams and engine.streams

    def watched_submit(*request, **more):
        counts[-1] += 1
        submit(*request, **more)

    def watched_read(prompt, sampling, output):
        completion = read(prompt, sampling, output)
        endings.add(trainer.processing_class.decode(completion.ids)[-20:])
        return completion

    def opened():
        counts.append(0)
        differences.append(largest_difference(trainer))

    engine.submit, engine._read = watched_submit, watched_read
    watch_rollouts(trainer, opened)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    result = {"logs": logs_of(trainer), "weight_differences": differences, "live_counts": counts}
    result |= {"endings": sorted(endings), "serves_adapter": serves_adapter(trainer)}
    result["base_change"] = max([(after[n] - weight).abs().max().item() for n, weight in base.items()], default=0)
    trainer.close()
    return result


def evaluate(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """The completions of a panel, of the same in other batches, and of the same with another seed."""
    options = {"steps_per_generation": 1, "max_turns": 4, "num_generations_eval": 2, "per_device_train_batch_size": 8}
    if mode == "evaluate in parallel":
        options |= {"vllm_tensor_parallel_size": ranks}
    trainer = make_trainer(folder, "full", rank, ranks, **options)
    result = {"initial_seed": torch.initial_seed(), "panels": []}
    for batch, seed in ((2, 0), (20, 0), (2, 1)):
        trainer.args.per_device_eval_batch_size, trainer.args.eval_seed = batch, seed
        rows = [dict(row) for row in trainer.eval_dataset for _ in range(2)]
        played = zip(*trainer.panels.play_all(rows, trainer.args.eval_temperature))
        completions = ((row["task_id"], [step.completion_ids for step in one.steps]) for one, row in played)
        result["panels"].append(sorted(completions))
    trainer.close()
    return result


if __name__ == "__main__":
    folder, mode = sys.argv[1:]
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    result = (evaluate if mode.startswith("evaluate") else train)(folder, mode, rank, ranks)
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
