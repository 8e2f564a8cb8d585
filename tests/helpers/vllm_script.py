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

import numpy as np
import torch
from datasets import Dataset
from letter_trainer import make_config
from peft import LoraConfig
from transformers import TrainerCallback

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_recipes.smollm2 import smollm2_in_cache
from g2po_trl import G2POTrainer

OPTIONS = {
    **{"num_generations": 8, "max_turns": 10, "max_prompt_length": 512, "max_completion_length": 24},
    **{"history_length": 2, "lr_scheduler_type": "constant", "engine": "vllm", "vllm_mode": "colocate"},
    **{"dataloader_pin_memory": False, "disable_tqdm": True, "seed": 42},
}


def worker_of(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker


def serves_adapter(trainer) -> bool:
    """Whether vLLM has the adapter beside the base."""
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


def something_wins(graph):
    """Whatever the rewards, something must be better than something else."""
    return np.linspace(-1, 1, graph.num_steps)


def make_trainer(folder, mode: str, rank: int, ranks: int, **options):
    """`options` of G2POConfig in place of those below."""
    games = Path(folder) / f"games-{rank}"  # the same on every rank, but two cannot write one folder
    generate_games(games, "train", 16, seed=0, size="tiny")
    manifest = Manifest.scan(games)
    several = {"steps_per_generation": 2, "max_steps": 6} if ranks == 1 else {"max_steps": 3}
    defaults = {**OPTIONS, "per_device_train_batch_size": 16 // ranks, **several}
    model, others = tiny_model_path(), {}
    if mode == "lora" or "adapter" in mode:
        modules = ["q_proj", "v_proj", "down_proj"]
        others["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules=modules)
    if mode == "lora":
        defaults["stop_sequences"] = ["</action>"]
    if mode == "adapter":
        defaults["engine_kwargs"] = {"merge_adapter": False}
    if mode == "pretrained":
        model, others["advantage_fn"] = smollm2_in_cache(), something_wins
        defaults |= {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 1, "max_turns": 4}
        defaults |= {"max_steps": 3, "learning_rate": 1e-4, "max_completion_length": 32}
    hidden = ("help", "look", "inventory", "examine")
    environment = partial(AlfworldEnvironment, manifest, hidden_actions=hidden, intro=False)
    others |= {"environment_factory": environment, "prompt_template": ALFWORLD_COMPACT_PROMPT}
    others["eval_dataset"] = Dataset.from_list(manifest.rows()[:4])
    args = make_config(f"{folder}/out", **{**defaults, **options})
    return G2POTrainer(str(model), args, Dataset.from_list(manifest.rows()), **others)


def train(folder: str, mode: str, rank: int, ranks: int) -> dict:
    trainer = make_trainer(folder, mode, rank, ranks)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    counts, differences, endings, cache = [], [], set(), []
    engine = trainer.player.actor.engine
    submit, read = engine.submit, engine._read
    assert trainer.player.streams and engine.streams

    def watched_submit(*request, **more):
        counts[-1] += 1
        submit(*request, **more)

    def watched_read(prompt, sampling, output):
        completion = read(prompt, sampling, output)
        endings.add(trainer.processing_class.decode(completion.ids)[-20:])
        cache[-1][0] += completion.cached_tokens
        cache[-1][1] += len(output.prompt_token_ids)
        return completion

    def opened():
        cache.append([0, 0])
        counts.append(0)
        differences.append(largest_difference(trainer))

    engine.submit, engine._read = watched_submit, watched_read
    watch_rollouts(trainer, opened)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    result = {"logs": logs_of(trainer), "cache": cache, "weight_differences": differences, "live_counts": counts}
    result |= {"endings": sorted(endings), "serves_adapter": serves_adapter(trainer)}
    result["base_change"] = max([(after[n] - weight).abs().max().item() for n, weight in base.items()], default=0)
    trainer.close()
    return result


class ChangeWeights(TrainerCallback):
    """Whatever the advantages are: each optimizer step leaves another policy, the same one in all runs."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        generator = torch.Generator().manual_seed(state.global_step)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                spread = 1.0 if "lora" in name else weight.std()
                weight += 0.05 * spread * torch.randn(weight.shape, generator=generator)


def evaluate(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """Panels before and after training; the syncs of each, the weights vLLM then plays with, and all completions."""
    options = {"per_device_eval_batch_size": 2, "steps_per_generation": 1, "max_steps": 3, "max_turns": 4}
    options |= {"save_strategy": "steps", "save_steps": 1, "num_generations_eval": 2, "stop_sequences": None}
    options |= {"per_device_train_batch_size": 8, "logging_steps": 1}
    if mode == "evaluate in parallel":
        options |= {"vllm_tensor_parallel_size": ranks}
    adapter = "lora" if mode in ("evaluate adapter", "evaluate resumed") else "full"
    trainer = make_trainer(folder, adapter, rank, ranks, **options)
    trainer.add_callback(ChangeWeights())
    events, sync, engine = [], trainer.vllm_generation.sync_weights, trainer.player.actor.engine
    ask = "submit" if engine.streams else "generate"
    asked = getattr(engine, ask)

    def counted_sync():
        events.append("sync")
        sync()

    def watched(*arguments):
        whole = trainer.vllm_generation.tensor_parallel_size == 1  # else each rank holds a part
        events.append(largest_difference(trainer) if whole else 0)
        return asked(*arguments)

    trainer.vllm_generation.sync_weights = counted_sync
    setattr(engine, ask, watched)

    def seen() -> dict:
        return {"syncs": events.count("sync"), "worst": max(event for event in events if event != "sync")}

    def panel(eval_seed=0, batch=2) -> dict:
        events.clear()
        trainer.args.eval_seed, trainer.args.per_device_eval_batch_size = eval_seed, batch
        rows = [dict(row) for row in trainer.eval_dataset for _ in range(2)]
        played = zip(*trainer.panels.play_all(rows, trainer.args.eval_temperature))
        completions = sorted((row["task_id"], [step.completion_ids for step in one.steps]) for one, row in played)
        return {"completions": completions, "first": events[0], **seen()}

    result = {"initial_seed": torch.initial_seed()}
    if mode == "evaluate resumed":
        trainer.args.max_steps = 4
        trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-3")
        result["resumed"] = seen()
        result["logs"] = [entry for entry in trainer.state.log_history if entry.get("step") == 4]
    else:
        result["before"], result["again"], result["other_batches"] = panel(), panel(), panel(batch=20)
        result["other_seed"] = panel(eval_seed=1)
        events.clear()
        trainer.train()
        result["training"] = seen()
        result["after"] = panel()
    trainer.close()
    return result


if __name__ == "__main__":
    folder, mode = sys.argv[1:]
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    result = (evaluate if mode.startswith("evaluate") else train)(folder, mode, rank, ranks)
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
