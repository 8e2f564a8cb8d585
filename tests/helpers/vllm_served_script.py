"""A run on generated ALFWorld games with real vLLM servers that are killed and started again; prints JSON.

`python vllm_served_script.py FOLDER weights|adapter|sharded|sharded-lora`; the last two by two ranks, with FSDP2.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import sharding
from vllm_script import make_trainer

from g2po_envs.alfworld.tiny import tiny_model_path

ITERATIONS = {"weights": 4, "adapter": 3, "sharded": 3, "sharded-lora": 3}
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Process:
    """vLLM's own command, on a port that it keeps when it is started again."""

    def __init__(self, folder: str, number: int, adapter: bool):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = Path(folder, f"server-{number}.log")
        self.url = f"http://127.0.0.1:{self.port}"
        self.adapter, self.process = adapter, None

    def start(self) -> None:
        more = ["--enable-lora", "--max-lora-rank", "8"] if self.adapter else []
        environment = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if self.adapter else "VLLM_SERVER_DEV_MODE": "1",
        }
        for name in (
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "MASTER_ADDR",
            "MASTER_PORT",
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
        ):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_path()), *more]
            + ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
            + ["--max-model-len", "600", "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"]
            + ["--enable-prompt-tokens-details"],
            env=environment,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to it and to its engine's process."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self.log.read_text()[-4000:]) from None
                time.sleep(0.5)


def run(folder: str, mode: str) -> dict:
    if RANK > 0:
        while not (port := Path(folder, "port")).is_file():
            time.sleep(0.1)
        return train(folder, mode, [SimpleNamespace(url=port.read_text(), wait=lambda: None)])
    processes = [Process(folder, number, mode == "adapter") for number in range(2 if mode == "weights" else 1)]
    Path(folder, "port.staged").write_text(processes[0].url)
    Path(folder, "port.staged").rename(Path(folder, "port"))
    for process in processes:
        process.start()
    try:
        return train(folder, mode, processes)
    finally:
        for process in processes:
            process.kill()


def train(folder: str, mode: str, processes: list[Process]) -> dict:
    options = sharding.prepare("fsdp2") if RANKS > 1 else {}
    trainer = make_trainer(
        folder,
        "full" if mode in ("weights", "sharded") else "lora",
        RANK,
        RANKS,
        pretend=lambda: sharding.pretend("fsdp2" if RANKS > 1 else "none"),
        engine="vllm_servers",
        engine_kwargs={"servers": [process.url for process in processes]},
        steps_per_generation=1,
        per_device_train_batch_size=16 // RANKS,
        max_steps=ITERATIONS[mode],
        logging_steps=1,
        stop_sequences=["</action>"],
        temperature=0.8,
        **options,
    )
    engine = trainer.player.actor.engine
    opened, poll, answered, iterations, starts = engine._open, engine.poll, [0], [0], []

    def start_again(which: list[Process]) -> None:
        for process in which:
            process.kill()
        # A supervisor takes a moment.
        starts.append(threading.Timer(1.0, lambda: [process.start() for process in which]))
        starts[-1].start()

    def watched_open():
        for start in starts:
            start.join()
        for process in processes:
            process.wait()
        iterations[0] += 1
        answered[0] = 0
        return opened()

    def watched_poll(timeout):
        before = answered[0]
        completions = poll(timeout)
        answered[0] += len(completions)
        if mode == "weights" and before < 20 <= answered[0]:
            if iterations[0] == 2:
                start_again(processes[1:])
            if iterations[0] == 4:
                start_again(processes)
        return completions

    engine._open, engine.poll = watched_open, watched_poll
    trainer.train()
    if RANKS > 1:
        sharding.check(trainer, "fsdp2")
    logs = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    left = sorted(path.name for path in engine.files.path.iterdir())
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.wait_for_everyone()
    return {
        "logs": logs,
        "takes_adapters": engine.weight_sync.takes_adapters,
        "folder": left,
        "folder_closed": sorted(path.name for path in engine.files.path.iterdir()),
    }


if __name__ == "__main__":
    result = run(*sys.argv[1:])
    Path(sys.argv[1], f"result-{RANK}.json").write_text(json.dumps(result))
