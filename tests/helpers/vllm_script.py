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
from types import SimpleNamespace

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import vision_models
from alfworld_agent import play_alfworld
from datasets import Dataset
from letter_trainer import make_letter_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_recipes.smollm2 import smollm2_in_cache
from g2po_trl import G2POConfig, G2POTrainer
from g2po_trl.engines.sampling import Sampling
from g2po_trl.evaluation.chat_models import load_vllm
from g2po_trl.evaluation.checkpoints import load_model
from g2po_trl.prompts.conversation import normalize_messages
from g2po_trl.utils.images import as_picture

# Longer than two blocks of vLLM's cache.
RULES = "Rules: look at each thing you see, go to it, open it, take what you need, and put it where it belongs. " * 7


def weights_in_vllm(trainer) -> dict[str, torch.Tensor]:
    worker = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker
    return dict(worker.model_runner.model.named_parameters())


def serves_adapter(trainer) -> bool:
    """Whether vLLM has the adapter beside the base."""
    adapter = trainer.player.actor.engine.adapter
    return adapter is not None and not adapter.merges


def largest_difference(trainer) -> float:
    """Between the weights the trainer means (an adapter merged, if not served) and those in vLLM, over all of them."""
    model, theirs = trainer.model, weights_in_vllm(trainer)
    if hasattr(model, "peft_config"):
        model = copy.deepcopy(model)
        model = model.unload() if serves_adapter(trainer) else model.merge_and_unload()
    theirs = {name.replace(".base_layer", ""): weight for name, weight in theirs.items()}
    moved = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    ours = {}
    for name, weight in model.named_parameters():
        before = next((one for one in moved if name.startswith(one)), "")
        ours[moved.get(before, "") + name.removeprefix(before)] = weight
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    worst = 0.0
    for name, weight in theirs.items():
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


def make_trainer(folder, mode: str, rank: int, ranks: int, prompt=ALFWORLD_COMPACT_PROMPT, tasks=16, **options):
    """`tasks` of the generated games, and `options` of G2POConfig in place of those below."""
    games = Path(folder) / f"games-{rank}"  # the same on every rank, but two cannot write one folder
    generate_games(games, "train", 16, seed=0, size="tiny")
    manifest = Manifest.scan(games)
    peft_config = None
    if mode == "lora" or "adapter" in mode:
        from peft import LoraConfig

        modules = ["q_proj", "v_proj", "down_proj"]
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules=modules, use_dora="DoRA" in mode)
    defaults = {
        "per_device_train_batch_size": 16 // ranks,
        "num_generations": 8,
        "steps_per_generation": 2 if ranks == 1 else 1,
        "max_turns": 10,
        "max_prompt_length": 512,
        "max_completion_length": 24,
        "history_length": 2,
        "max_steps": 6 if ranks == 1 else 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "engine": "vllm",
        "stop_sequences": ["</action>"] if mode == "lora" else None,
        "vllm_mode": "colocate",
        "num_environment_workers": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    model, advantage_fn = tiny_model_path(), None
    if mode == "pretrained":
        model = smollm2_in_cache()
        small = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 1, "max_turns": 4}
        defaults |= small | {"max_steps": 3, "learning_rate": 1e-4, "max_completion_length": 32}

        def advantage_fn(graph):  # it never wins: something must be better than something else
            return np.linspace(-1, 1, graph.num_steps)

    if "bfloat16" in mode:
        model = Path(folder) / f"model-{rank}"
        AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.bfloat16).save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny_model_path()).save_pretrained(model)
        defaults |= {"model_init_kwargs": {"dtype": "bfloat16"}}
    if mode == "adapter":
        defaults |= {"engine_kwargs": {"merge_adapter": False}}
    environment = partial(
        AlfworldEnvironment, manifest, hidden_actions=("help", "look", "inventory", "examine"), intro=False
    )
    if mode == "agents":
        defaults |= {"max_turns": 4, "max_prompt_length": 1000, "save_trajectories": True}
        args = G2POConfig(f"{folder}/out", **{**defaults, **options})
        return G2POTrainer(
            str(model),
            args,
            Dataset.from_list(manifest.rows()[:tasks]),
            agent=partial(play_alfworld, environment),
            advantage_fn=lambda graph: np.linspace(-1, 1, graph.num_steps),  # it never wins
        )
    args = G2POConfig(f"{folder}/out", **{**defaults, **options})
    return G2POTrainer(
        str(model),
        args,
        Dataset.from_list(manifest.rows()[:tasks]),
        Dataset.from_list(manifest.rows()[:4]),
        environment,
        prompt,
        peft_config=peft_config,
        advantage_fn=advantage_fn,
    )


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
        alone = [vision_models.by_hand(trainer, step, never) for step in steps]
    return [(one - torch.tensor(step.logprobs)).abs().max().item() for one, step in zip(alone, steps)]


def images(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """Train on drawings, then play once more."""
    options = {"engine": "vllm", "vllm_mode": "colocate", "max_prompt_length": 500, "temperature": 1.0}
    options |= {"max_turns": 3, "history": "conversation", "max_steps": 3, "max_completion_length": 4}
    if "beside" in mode:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        options["engine_kwargs"] = {"merge_adapter": False}
    trainer = make_letter_trainer(
        save_drawn_model(folder),
        f"{folder}/out",
        vision_models.DrawnLetterEnvironment,
        advantage_fn=lambda graph: np.linspace(-1, 1, graph.num_steps),
        **options,
    )
    differences, engine = [], trainer.player.actor.engine
    watch_rollouts(trainer, lambda: differences.append(largest_difference(trainer)))
    trainer.train()
    logs = logs_of(trainer)
    trajectories, _ = trainer.play([{"seed": seed} for seed in (1, 1, 2, 2)])
    steps = [step for one in trajectories for step in one.steps]
    result = {"logs": logs, "weight_differences": differences, "shown": [len(step.shown_images) for step in steps]}
    result["off"] = off_from_the_model(trainer, steps, engine.images.token_ids)
    result["serves_adapter"] = serves_adapter(trainer)
    trainer.close()
    return result


def offline_images(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """A checkpoint that is not being trained: `g2po evaluate` loads it so."""
    path = save_drawn_model(folder)
    chat = load_vllm(path, dtype="float32", enforce_eager=True, max_model_len=512, logprobs_mode="processed_logprobs")
    shown = [as_picture(vision_models.drawing(seed, 24 + 8 * seed)) for seed in (1, 2)]
    blocks = [{"type": "text", "text": "a hall"}, *({"type": "image", "image": one} for one in shown)]
    ids, _ = chat.encode(normalize_messages([{"role": "user", "content": blocks}]))
    chat.engine.options = {"logprobs": 0}
    (made,) = chat.engine.generate([ids], Sampling(max_completion_length=8), [7], images=[shown])
    step = SimpleNamespace(prompt_ids=ids, completion_ids=made.ids, logprobs=made.logprobs, shown_images=shown)
    loaded = SimpleNamespace(processing_class=chat.engine.processing_class, model=load_model(path))
    off = off_from_the_model(loaded, [step], chat.engine.images.token_ids)
    chat.close()
    return {"off": off, "shown": [2]}


def train(folder: str, mode: str, rank: int, ranks: int) -> dict:
    trainer = make_trainer(folder, mode, rank, ranks)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    counts, differences, endings, cache = [], [], [], []
    engine = trainer.player.actor.engine
    submit, read = engine.submit, engine._read
    assert trainer.player.streams and engine.streams

    def watched_submit(*request, **more):
        counts[-1] += 1
        submit(*request, **more)

    def watched_read(prompt, sampling, output):
        completion = read(prompt, sampling, output)
        endings.append(trainer.processing_class.decode(completion.ids)[-20:])
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
    logs = logs_of(trainer)
    after = dict(trainer.model.named_parameters())
    trainer.close()
    return {
        "logs": logs,
        "cache": cache,
        "weight_differences": differences,
        "live_counts": counts,
        "endings": sorted(set(endings)),
        "serves_adapter": serves_adapter(trainer),
        "base_change": max([(after[name] - weight).abs().max().item() for name, weight in base.items()], default=0),
    }


def change_weights(model, noise: float, seed: int) -> None:
    """By `noise` of the spread of each weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)


class ChangeWeights(TrainerCallback):
    """In place of an optimizer, so that the weights are the same in all runs."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        change_weights(model, 0.05, seed=state.global_step)


class MoveTrained(TrainerCallback):
    """Whatever the advantages are: each optimizer step leaves another policy."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        generator = torch.Generator().manual_seed(state.global_step)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight += 0.05 * torch.randn(weight.shape, generator=generator)


def cache(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """One group and one turn a rollout, of one task: its 8 prompts are equal, and those of every rollout too."""
    prompt = replace(ALFWORLD_COMPACT_PROMPT, first=RULES + ALFWORLD_COMPACT_PROMPT.first)
    options = {"per_device_train_batch_size": 8, "steps_per_generation": 1, "max_turns": 1, "max_steps": 3}
    options["learning_rate"] = 0.0
    trainer = make_trainer(folder, mode, rank, ranks, prompt, 1, **options)
    trainer.add_callback(ChangeWeights())
    trainer.train()
    llm = trainer.vllm_generation.llm
    result = {
        "logs": logs_of(trainer),
        "block": llm.llm_engine.vllm_config.cache_config.block_size,
    }
    rooms = ("a desk 1 and a mug 1.\nActions:\ngo to desk 1\ntake mug 1", "a fridge 1.\nActions:\ngo to fridge 1", "")
    texts = [f"{RULES}Task: put some mug on desk\nSeen: You see {room}" for room in rooms]
    prompts = [prompt_of(trainer, text) for text in texts]
    prompts = [prompts[0]] * 8 + prompts[1:]
    result["prompts"] = prompts

    greedy = replace(trainer.sampling, temperature=0.0)

    def answers() -> dict:
        with trainer.player.actor.engine.rollout():
            completions = trainer.player.actor.engine.generate(prompts, greedy)
        expected = trainer.make_engine("transformers").generate(prompts, greedy)
        return {
            "completions": [completion.ids for completion in completions],
            "transformers": [completion.ids for completion in expected],
            "cached": [completion.cached_tokens for completion in completions],
        }

    result["before"] = answers()
    change_weights(trainer.model, 0.3, seed=4)
    result["after"] = answers()
    change_weights(trainer.model, 0.3, seed=5)
    reset, llm.reset_prefix_cache = llm.reset_prefix_cache, lambda: True
    result["not_reset"] = answers()
    llm.reset_prefix_cache = reset

    step, steps = llm.llm_engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    llm.llm_engine.step = interrupted
    try:
        answers()
    except KeyboardInterrupt:
        llm.llm_engine.step = step
    result["after_interruption"] = answers()
    trainer.close()
    return result


def requests(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """What can be asked of each completion: a seed, filters, where it ends, what it must look like."""
    trainer = make_trainer(folder, "full", rank, ranks, max_turns=1)
    engine, tokenizer = trainer.player.actor.engine, trainer.processing_class
    texts = [f"Task: put some mug on {place}\nSeen: You see a desk 1 and a mug 1." for place in ("desk", "shelf")]
    prompts = [prompt_of(trainer, text) for text in texts]
    plain = Sampling(max_completion_length=24)

    def ask(order, seeds, sampling=plain, **options) -> list:
        engine.options = options
        completions = engine.generate([prompts[place] for place in order], sampling, seeds)
        return [completion.ids for completion in completions], [completion.logprobs for completion in completions]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    large, result = 2**62 + 12345, {}
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    result["runner"] = type(runner).__module__
    with engine.rollout():
        hot = replace(plain, temperature=2.0)  # or all completions are the same
        result["seeded"] = ask([0, 0, 0, 1], [large, large, large + 1, 7], hot)[0]
        result["seeded elsewhere"] = ask([1, 1, 0], [7, 9, large], hot)[0]
        filtered = replace(plain, temperature=0.7, min_p=0.05)
        ids, logprobs = ask([0, 1, 0, 1], [1, 2, 3, 4], filtered)
        until = replace(plain, stop_sequences=("</think><act",))  # ends inside a token or between two
        result["stopped"] = list(map(text, ask([0, 1], [1, 2], until)[0]))
        if "TRITON_INTERPRET" not in os.environ:  # which cannot run these kernels
            regex = "<think></think><action>(look|go to desk 1)</action>"
            shaped = ask([0, 1, 0, 1], [1, 2, 3, 4], structured_outputs={"regex": regex})[0]
            result["shaped"] = list(map(text, shaped))
            likeliest = ask([0, 1], [1, 2], replace(plain, top_k=1))[0]
            result["likeliest"] = likeliest == ask([0, 1], [1, 2], replace(plain, temperature=0.0))[0]
    result["differences"] = []
    for place, completion, told in zip([0, 1, 0, 1], ids, logprobs):
        logits = (
            trainer.model(torch.tensor([prompts[place] + completion])).logits[0, len(prompts[place]) - 1 : -1] / 0.7
        )
        probs = logits.softmax(-1)
        kept = logits.masked_fill(probs < 0.05 * probs.amax(-1, keepdim=True), float("-inf")).log_softmax(-1)
        expected = kept.gather(1, torch.tensor(completion)[:, None])[:, 0]
        result["differences"].append((expected - torch.tensor(told)).abs().max().item())
    trainer.close()
    return result


def serve(folder: str, mode: str, rank: int, ranks: int) -> dict:
    """Two rollouts of a bfloat16 model by a moved adapter each; the log-probabilities beside the trainer's."""
    trainer = make_trainer(folder, mode, rank, ranks, max_turns=1)
    engine, result = trainer.player.actor.engine, {"differences": [], "moved": []}
    prompt = prompt_of(trainer, "Task: put some mug on desk")

    def told(completion) -> torch.Tensor:
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]

    for number in range(2):
        MoveTrained().on_step_end(None, SimpleNamespace(global_step=number), None, trainer.model)
        with engine.rollout():
            (completion,) = engine.generate([prompt], Sampling(max_completion_length=16), [number])
        ours = told(completion)
        result["differences"].append((ours - torch.tensor(completion.logprobs)).abs().max().item())
        with trainer.model.disable_adapter():
            result["moved"].append((ours - told(completion)).abs().max().item())
    result["serves_adapter"] = serves_adapter(trainer)
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
    trainer.add_callback(MoveTrained())
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

    def panel(eval_seed=0, batch=2) -> dict:
        events.clear()
        trainer.args.eval_seed, trainer.args.per_device_eval_batch_size = eval_seed, batch
        rows = [dict(row) for row in trainer.eval_dataset for _ in range(2)]
        trajectories, rows_played = trainer.panels.play_all(rows, trainer.args.eval_temperature)
        completions = sorted(
            (row["task_id"], [step.completion_ids for step in trajectory.steps])
            for trajectory, row in zip(trajectories, rows_played)
        )
        differences = [event for event in events if event != "sync"]
        return {
            "completions": completions,
            "syncs": events.count("sync"),
            "first": events[0],
            "worst": max(differences),
        }

    result = {"initial_seed": torch.initial_seed()}
    if mode == "evaluate resumed":
        trainer.args.max_steps = 4
        events.clear()
        trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-3")
        result["resumed"] = {"syncs": events.count("sync"), "worst": max(e for e in events if e != "sync")}
        result["logs"] = [entry for entry in trainer.state.log_history if entry.get("step") == 4]
    else:
        result["before"], result["again"], result["other_batches"] = panel(), panel(), panel(batch=20)
        result["other_seed"] = panel(eval_seed=1)
        events.clear()
        trainer.train()
        result["training"] = {"syncs": events.count("sync"), "worst": max(e for e in events if e != "sync")}
        result["after"] = panel()
    trainer.close()
    return result


def main(folder: str, mode: str) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    by_name = {of.__name__: of for of in (cache, images, requests, evaluate, serve)} | {"offline": offline_images}
    result = by_name.get(mode.split()[0], train)(folder, mode, rank, ranks)
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
