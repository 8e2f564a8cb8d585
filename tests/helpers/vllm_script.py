"""A short run on generated ALFWorld games with vLLM in the trainer's process; prints what its test checks, as JSON.

Its own process: vLLM binds memory, changes torch's threads and leaves torch.distributed initialised.
"""

import copy
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import vision_models
from datasets import Dataset
from letter_environment import DrawnLetterEnvironment
from letter_trainer import make_config, make_letter_trainer
from peft import LoraConfig
from transformers import TrainerCallback

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_recipes.smollm2 import smollm2_in_cache
from g2po_trl import G2POTrainer
from g2po_trl.engines.sampling import Sampling

# Longer than two blocks of vLLM's cache.
RULES = "Rules: look at each thing you see, go to it, open it, take what you need, and put it where it belongs. " * 7
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
    moved = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    ours = {}
    for name, weight in model.named_parameters():
        before = next((one for one in moved if name.startswith(one)), "")
        ours[moved.get(before, "") + name.removeprefix(before)] = weight
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


def prompt_of(trainer, text: str) -> list[int]:
    return trainer.player.actor.encode([{"role": "user", "content": text}])[0]


def log_probs_of(trainer, prompt, completion, change=lambda logits: logits) -> torch.Tensor:
    """Of a completion's tokens, by the trainer's model."""
    with torch.no_grad():
        logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return change(logits).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def difference(ours: torch.Tensor, theirs: list[float]) -> float:
    return (ours - torch.tensor(theirs)).abs().max().item()


def something_wins(graph):
    """Whatever the rewards, something must be better than something else."""
    return np.linspace(-1, 1, graph.num_steps)


def make_trainer(folder, mode: str, rank: int, ranks: int, prompt=ALFWORLD_COMPACT_PROMPT, tasks=16, **options):
    """`tasks` of the generated games, and `options` of G2POConfig in place of those below."""
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
    others |= {"environment_factory": environment, "prompt_template": prompt}
    others["eval_dataset"] = Dataset.from_list(manifest.rows()[:4])
    args = make_config(f"{folder}/out", **{**defaults, **options})
    return G2POTrainer(str(model), args, Dataset.from_list(manifest.rows()[:tasks]), **others)


def save_drawn_model(folder: str) -> str:
    """A folder with a tiny Qwen2.5-VL, of its own classes: vLLM loads its processor from there."""
    model, processor = vision_models.build("Qwen2.5-VL", head_dim=32)
    for part in (model, vision_models.with_videos(processor)):
        part.save_pretrained(f"{folder}/model")
    return f"{folder}/model"


def off_from_the_model(trainer, steps, never) -> list[float]:
    """How far the log-probabilities of steps are from those of the model's own forward pass without tokens."""
    trainer.model.eval()
    with torch.no_grad():
        return [difference(vision_models.by_hand(trainer, step, never), step.logprobs) for step in steps]


def images(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """Train on drawings, then play once more."""
    options = {"engine": "vllm", "vllm_mode": "colocate", "max_prompt_length": 500, "temperature": 1.0}
    options |= {"max_turns": 3, "history": "conversation", "max_completion_length": 4, "advantage_fn": something_wins}
    game = DrawnLetterEnvironment
    trainer = make_letter_trainer(save_drawn_model(folder), f"{folder}/out", game, **options)
    differences = []
    watch_rollouts(trainer, lambda: differences.append(largest_difference(trainer)))
    trainer.train()
    trajectories, _ = trainer.play([{"seed": seed} for seed in (1, 1, 2, 2)])
    steps = [step for one in trajectories for step in one.steps]
    result = {"logs": logs_of(trainer), "weight_differences": differences}
    result["shown"] = [len(step.shown_images) for step in steps]
    result["off"] = off_from_the_model(trainer, steps, trainer.player.actor.engine.images.token_ids)
    trainer.close()
    return result


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


def change_weights(model, noise: float, seed: int) -> None:
    """Those that are trained, by `noise` of the spread of each; an adapter's by `noise`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                spread = 1.0 if "lora" in name else weight.std()
                weight += noise * spread * torch.randn(weight.shape, generator=generator)


class ChangeWeights(TrainerCallback):
    """Whatever the advantages are: each optimizer step leaves another policy, the same one in all runs."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        change_weights(model, 0.05, seed=state.global_step)


def cache(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """One group and one turn a rollout, of one task: its 8 prompts are equal, and those of every rollout too."""
    prompt = replace(ALFWORLD_COMPACT_PROMPT, first=RULES + ALFWORLD_COMPACT_PROMPT.first)
    options = {"per_device_train_batch_size": 8, "steps_per_generation": 1, "max_turns": 1, "max_steps": 3}
    trainer = make_trainer(folder, mode, rank, ranks, prompt, 1, learning_rate=0.0, **options)
    trainer.add_callback(ChangeWeights())
    trainer.train()
    llm, engine = trainer.vllm_generation.llm, trainer.player.actor.engine
    result = {"logs": logs_of(trainer), "block": llm.llm_engine.vllm_config.cache_config.block_size}
    rooms = ("a desk 1 and a mug 1.\nActions:\ngo to desk 1\ntake mug 1", "a fridge 1.\nActions:\ngo to fridge 1", "")
    texts = [f"{RULES}Task: put some mug on desk\nSeen: You see {room}" for room in rooms]
    prompts = [prompt_of(trainer, text) for text in texts]
    prompts = [prompts[0]] * 8 + prompts[1:]
    result["prompts"] = prompts
    greedy = replace(trainer.sampling, temperature=0.0)

    def answers() -> dict:
        with engine.rollout():
            completions = engine.generate(prompts, greedy)
        trainer.args.engine, trainer.args.engine_kwargs = "transformers", None
        expected = [completion.ids for completion in trainer.make_engine().generate(prompts, greedy)]
        ids, cached = zip(*((completion.ids, completion.cached_tokens) for completion in completions))
        return {"completions": list(ids), "transformers": expected, "cached": list(cached)}

    result["before"] = answers()
    change_weights(trainer.model, 0.3, seed=4)
    result["after"] = answers()
    change_weights(trainer.model, 0.3, seed=5)
    reset, llm.reset_prefix_cache = llm.reset_prefix_cache, lambda: True
    result["not_reset"] = answers()
    llm.reset_prefix_cache = reset
    trainer.close()
    return result


def requests(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """What can be asked of each completion: a seed, filters, where it ends, what it must look like."""
    trainer = make_trainer(folder, "full", rank, ranks, max_turns=1)
    engine, tokenizer = trainer.player.actor.engine, trainer.processing_class
    texts = [f"Task: put some mug on {place}\nSeen: You see a desk 1 and a mug 1." for place in ("desk", "shelf")]
    prompts = [prompt_of(trainer, text) for text in texts]
    plain = Sampling(max_completion_length=24)

    def ask(order, seeds, sampling=plain, **options) -> list[list[int]]:
        engine.options = options
        asked[:] = engine.generate([prompts[place] for place in order], sampling, seeds)
        return [completion.ids for completion in asked]

    def texts_of(*request, **options) -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in ask(*request, **options)]

    def filtered(logits):
        probs = (logits / 0.7).softmax(-1)
        return (logits / 0.7).masked_fill(probs < 0.05 * probs.amax(-1, keepdim=True), float("-inf"))

    large, asked, result = 2**62 + 12345, [], {}
    with engine.rollout():
        hot = replace(plain, temperature=2.0)  # or all completions are the same
        result["seeded"] = ask([0, 0, 0, 1], [large, large, large + 1, 7], hot)
        result["seeded elsewhere"] = ask([1, 1, 0], [7, 9, large], hot)
        ask([0, 1, 0, 1], [1, 2, 3, 4], replace(plain, temperature=0.7, min_p=0.05))
        result["differences"] = [
            difference(log_probs_of(trainer, prompts[place], one.ids, filtered), one.logprobs)
            for place, one in zip([0, 1, 0, 1], asked, strict=True)
        ]
        until = replace(plain, stop_sequences=("</think><act",))  # ends inside a token or between two
        result["stopped"] = texts_of([0, 1], [1, 2], until)
        regex = "<think></think><action>(look|go to desk 1)</action>"
        result["shaped"] = texts_of([0, 1, 0, 1], [1, 2, 3, 4], structured_outputs={"regex": regex})
        likeliest = ask([0, 1], [1, 2], replace(plain, top_k=1))
        result["likeliest"] = likeliest == ask([0, 1], [1, 2], replace(plain, temperature=0.0))
    trainer.close()
    return result


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
    by_name = {of.__name__: of for of in (cache, images, requests, evaluate)}
    result = by_name.get(mode.split()[0], train)(folder, mode, rank, ranks)
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
