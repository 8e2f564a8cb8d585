"""Memory of colocated vLLM with sleep mode off and on, and of LoRA beside the base: peaks against `g2po estimate`.

    python -m benchmarks.gpu.memory --output OUTPUT --seconds 480 [--arms awake asleep lora]
    python -m benchmarks.gpu.memory --output OUTPUT --seconds 300 --shrink    # tiny, by `generate`, also without a GPU

Each arm is a process, one after the other: two iterations with the settings of a recipe on the shape of Qwen2.5-1.5B,
random weights. A rollout has the engine answer synthetic prompts, and hands over synthetic episodes as long as the
paper's (`work.py`). In the meantime a thread reads how much of the GPU is in use, by whom is not asked: nothing else
may run there. What was in use before the trainer was made, the CUDA context among it, is left out, as in the estimate.

OUTPUT/results.json has for each arm the parts that `g2po estimate` counts, their sum at the peak of rollout and update
(sleep mode frees vLLM's part for the update, which `g2po estimate` does not count on), what was in use, and the bytes
of weights, reference, gradients and Adam's moments that the trainer held. Without a GPU the thread reads the memory
of the process, the sleeping arm is left out, and only the held bytes can be compared. **Never run on a GPU so far.**
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.jobs import (
    Job,
    Report,
    absolute_path,
    commit,
    failed,
    lay_paths,
    machine,
    port_of,
    run,
    write_page,
)

RECIPES = common.ROOT / "recipes"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> recipe, its fields that differ
    "awake": ("qwen2.5-1.5b", {"vllm_enable_sleep_mode": False, "per_device_train_batch_size": 16}),
    "asleep": ("qwen2.5-1.5b", {"vllm_enable_sleep_mode": True, "per_device_train_batch_size": 16}),
    "lora": ("qwen2.5-1.5b-lora", {"engine_kwargs": {"merge_adapter": False}, "per_device_train_batch_size": 8}),
}
TURNS = 12  # few and long episodes: each mini-batch fills some micro-batches
SHRUNK: dict[str, Any] = {"use_vllm": False, "engine_kwargs": {}, "max_tokens_per_micro_batch": 512, "bf16": False}
SHRUNK["max_completion_length"] = 8


def counted(parts: Mapping[str, float], asleep: bool) -> dict[str, float]:
    """Return the sum of an estimate's parts at the peaks of rollout, which has no gradients, and update."""
    total, gradients = sum(parts.values()), parts.get("gradients", 0.0)
    return {"rollout": total - parts["update"] - gradients, "update": total - asleep * parts.get("vLLM", 0.0)}


def estimate(recipe: str, model: str, options: Mapping[str, Any], memory: float) -> dict[str, float]:
    """Return bytes by part as `g2po estimate` counts them, on a GPU of so many bytes."""
    from g2po_trl.cli.commands.estimate import recipe_settings
    from g2po_trl.estimate.memory import memory_parts
    from g2po_trl.estimate.plan import Plan

    words = ["--config", str(RECIPES / f"alfworld/{recipe}.yaml"), "--model_name_or_path", model]
    for name, value in options.items():
        words += [f"--{name}", json.dumps(value)]
    plan = Plan.from_settings(recipe_settings(RECIPES / "train_alfworld.py", words))
    shape = plan.shape()
    return {part.name: part.size for part in memory_parts(shape, plan.training(shape.dtype), memory)}


def held(trainer: Any, gradients: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of tensors that a trainer holds, under the names of the estimate's parts."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    state = trainer.optimizer.state
    adam = sum(_bytes(moment for moment in state[p].values() if moment.ndim) for p in trained)
    if frozen:
        return {"weights": _bytes(frozen), "adapter": _bytes(trained) + gradients["all"] + adam}
    reference = {"reference": _bytes(trainer.ref_model.parameters())} if trainer.ref_model is not None else {}
    return {"weights": _bytes(trained), **reference, "gradients": gradients["all"], "Adam": adam}


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def process_memory() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meter(threading.Thread):
    """Keeps the largest amount in use, by phase, above that at the start.

    Args:
        in_use: returns bytes.
        every: seconds between two looks.
    """

    def __init__(self, in_use: Callable[[], int], every: float = 0.002):
        super().__init__(daemon=True)
        self.in_use, self.every, self.before = in_use, every, in_use()
        self.peaks: dict[str, int] = {}
        self.phase, self.ended = "start", threading.Event()

    def look(self) -> None:
        phase = self.phase  # before the look: what is in use when a phase ends is not the next one's
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.in_use() - self.before)

    def run(self) -> None:
        while not self.ended.wait(self.every):
            self.look()

    def close(self) -> dict[str, int]:
        self.ended.set()
        self.join()
        return self.peaks


def play(args: argparse.Namespace, say: Callable[..., None]) -> None:
    """Run one arm."""
    import torch
    from transformers import TrainerCallback

    from benchmarks.gpu import work
    from g2po_trl.engines.sampling import Sampling

    recipe, options = ARMS[args.arm]
    on_gpu = torch.cuda.is_available()
    options = {**options, **(SHRUNK if args.shrink else {})}
    memory = torch.cuda.mem_get_info()[1] if on_gpu else 80e9
    parts = estimate(recipe, str(args.model), options, memory)
    asleep = bool(options.get("vllm_enable_sleep_mode"))
    say(counted=parts, peaks_counted=counted(parts, asleep), memory=memory, memory_of="GPU" if on_gpu else "process")

    def gpu_memory() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    class Rollout(work.RecordedRollout):
        def collect(self, rows, groups, iteration):
            meter.phase = "rollout"
            found = super().collect(rows, groups, iteration)
            prompts = [list(one.steps[0].prompt_ids) for one in found.trajectories]
            engine, length = self.trainer.player.actor.engine, self.trainer.args.max_completion_length
            with engine.rollout():
                answered = engine.generate(prompts, Sampling(1.0, max_completion_length=length))
            meter.look()
            meter.phase = "update"
            say(generated_tokens=sum(len(one.ids) for one in answered))
            return found

    class Gradients(TrainerCallback):
        largest = {"all": 0}

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            now = _bytes(p.grad for p in model.parameters() if p.grad is not None)
            self.largest["all"] = max(self.largest["all"], now)
            meter.look()

    work.RecordedTrainer.turns = 3 if args.shrink else TURNS
    if args.shrink:
        work.RecordedTrainer.vocabulary, work.RecordedTrainer.lengths = 2000, (40, 4, 40, 12)
    meter = Meter(gpu_memory if on_gpu else process_memory)
    meter.start()
    with tempfile.TemporaryDirectory() as folder:
        path = RECIPES / f"alfworld/{recipe}.yaml"
        trainer = work.recipe_trainer(
            path, Path(folder), str(args.model), **{"use_vllm": True, **options}, use_cpu=not on_gpu
        )
        trainer.strategy = Rollout(trainer.strategy.context)
        trainer.strategy.trainer = trainer
        trainer.add_callback(Gradients())
        trainer.train()
        peaks = meter.close()
        found = held(trainer, Gradients.largest)
        by_torch = torch.cuda.max_memory_allocated() if on_gpu else None
        say(held=found, peaks=peaks, torch_peak=by_torch, update=_logged(trainer), steps=trainer.state.global_step)
        trainer.close()


def _logged(trainer: Any) -> dict[str, float]:
    """Return how full micro-batches were in the last iteration."""
    log = next(log for log in reversed(trainer.state.log_history) if "update/micro_batches" in log)
    return {name: log[f"update/{name}"] for name in ("micro_batches", "forwarded_tokens")}


def make_model(folder: Path, shrink: bool) -> list[str]:
    """Return the program that writes the model: in a process of its own, which leaves the GPU."""
    shape = "(64, 128, 2, 4, 2, 2048)" if shrink else "'1.5b'"
    code = "import pathlib, torch; from benchmarks.speed.phases import make_shape; "
    return [sys.executable, "-c", f"{code}make_shape(pathlib.Path({str(folder)!r}), {shape}, torch.bfloat16)"]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=absolute_path, help="results.json, table.md and a log of each arm")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all arms")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--wheels", type=absolute_path, help="folder of wheels that are not installed here")
    parser.add_argument("--shrink", action="store_true", help="a tiny model and `generate`, to see that it runs")
    for name, kind in (("arm", str), ("findings", Path), ("model", Path)):  # of an arm's process
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.output is None and args.arm is None:
        parser.error("--output is not given: name a folder")
    return args


def main() -> None:
    args = arguments()
    if args.arm:

        def say(**finding: Any) -> None:
            with args.findings.open("a") as file:
                file.write(json.dumps(finding) + "\n")

        play(args, say)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        report = measure(args, Path(scratch))
    write_page(report)
    if names := failed(report.content["parts"]):
        sys.exit(f"failed: {', '.join(names)}; see the logs in {args.output}")


def measure(args: argparse.Namespace, work: Path) -> Report:
    """Run the arms, one after the other."""
    started, environment = time.monotonic(), {**lay_paths(work, args.wheels), **port_of(0)}
    content = {
        "command": common.command(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "shrink": args.shrink,
        "machine": machine(environment),
        "arms": {name: {"recipe": ARMS[name][0], **ARMS[name][1]} for name in args.arms},
        "skipped": {},
        "parts": {},
    }
    report = Report(args.output / "results.json", content)

    def job(name: str, command: list[str]) -> Job:
        return Job(name, command, args.output, args.seconds - (time.monotonic() - started), environment)

    run([job("model", make_model(work / "model", args.shrink))], report)
    for name in args.arms:
        if name == "asleep" and args.shrink:
            content["skipped"][name] = "sleep mode is vLLM's, and frees memory of a GPU"
            continue
        command = [sys.executable, "-m", "benchmarks.gpu.memory", "--arm", name, "--model", str(work / "model")]
        command += ["--findings", str(args.output / f".{name}.jsonl"), *(["--shrink"] if args.shrink else [])]
        run([job(name, command)], report)
    report.write()
    return report


if __name__ == "__main__":
    main()
