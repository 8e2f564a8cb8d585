"""Coding agents of others, unchanged: what they send, what they cost, and one training iteration on it.

    npm install @anthropic-ai/claude-code @openai/codex
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --tokenizer FOLDER --output FOLDER

A folder has a function with a wrong operator, and a test. A script in place of a model fixes it through the agent's
shell, twice, then has sub-agents ask in parallel, hangs the shell, kills the agent, and leaves processes. Then a model
of two layers with random weights plays four episodes of up to three turns, of which the script plays the first two,
and trains on them. The update is made again from the same episodes in each layout, in a process of its own: positions,
CPU seconds, memory, and how much the gradient differs from that of one step sample after the other, by the model's own
forward pass. Prints and writes the command, the machine and every value.
"""

import argparse
import itertools
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from benchmarks.common import facts, write_results
from g2po_trl import AgentCommand, AgentEnvironment, G2POConfig, G2POTrainer, Observation, StepResult, TextEnvironment
from g2po_trl.engines.base import Completion
from g2po_trl.prompts.conversation import ChatResponse
from g2po_trl.rollout.strategy import Rollout

FILES = {
    "add.py": "def add(a, b):\n    return a - b\n",
    "test_add.py": "from add import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
EPISODES, MICRO_BATCH = 4, 16_384  # tokens; a sample of 20,000 is a micro-batch by itself
NOTES = ("first-note", "second-note")  # which the scripted turns leave in the conversation
FIX = "sed -i 's/a - b/a + b/' add.py && date && echo fixed"
SCRIPTS = {
    "fixes": [FIX, None],
    "fixes again": [FIX, None],
    "answers at once": [None],
    "hangs": ["sleep 1000"],
    "is killed": ["pkill -9 -f 'Fix the test'"],
    "leaves processes": ["(setsid sleep 1000 &) ; echo left", None],
    "kills its supervisor": ["(setsid sleep 1000 &) ; pkill -9 -f supervisor.py"],
    "asks in parallel": [("one", "two"), *[None] * 5],
}


def command(name: str, folder: Path, workspace: Path, timeout: float = 600) -> AgentCommand:
    """Return a client as docs/agents.md runs it."""
    options = {
        "workspace": workspace,
        "restore": ["test_*.py"],
        "verify": "python -m pytest -q -p no:cacheprovider",
        "timeout": timeout,
        "verify_timeout": 60,
    }
    if name == "claude":
        words = [str(folder / "claude"), "-p", "{task}", "--allowedTools", "Bash"]
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
        return AgentCommand(words, environment=quiet, **options)
    provider = (
        " -c model_provider=g2po -c model_providers.g2po.name=g2po -c model_providers.g2po.wire_api=responses"
        " -c model_providers.g2po.env_key=OPENAI_API_KEY -c model_providers.g2po.base_url=$OPENAI_BASE_URL"
    )
    line = f"{folder / 'codex'} exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check"
    return AgentCommand(["sh", "-c", f'{line} -m $OPENAI_MODEL{provider} "$0"', "{task}"], **options)


def calls_of(tools: list[dict], line: str | tuple[str, ...] | None) -> list[dict]:
    """Return the calls by which an agent runs a command, or has sub-agents answer questions at the same time."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(line, tuple):
        name = next(name for name in names if name == "Agent" or name.endswith("spawn_agent"))
        options = {"description": "Look"} if name == "Agent" else {}
        return [call_of(name, {"prompt" if options else "message": f"Look at {text}", **options}) for text in line]
    return [] if line is None else [shell("Bash" if "Bash" in names else "exec_command", line)]


def shell(name: str, line: str) -> dict:
    """Return the call of a shell by its name."""
    return call_of(name, {"command": line, "description": "Run"} if name == "Bash" else {"cmd": line})


def call_of(name: str, arguments: dict[str, str]) -> dict:
    """Return a call as the model's response has it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def play(agent: AgentCommand, script: list[str | None]) -> dict:
    """Play one episode by a script of shell commands; `None` ends it."""
    environment, started = AgentEnvironment(agent, max_turns=10), time.perf_counter()
    steps, lines, result = [], list(script), None
    seen = environment.reset(task="Fix the test")
    first = time.perf_counter() - started
    while result is None or not (result.terminated or result.truncated):
        request = seen.request
        steps.append(
            {
                "characters": len(json.dumps([request.messages, request.tools])),
                "tools": len(request.tools or ()),
                "news": seen.text[:300],
                "key": seen.state_key,
            }
        )
        calls = tuple(calls_of(request.tools, lines.pop(0) if lines else None))
        response = ChatResponse("" if calls else "Done.", calls, "tool_calls" if calls else "stop")
        result = environment.step(response.to_action())
        seen = result.observation
    environment.close()
    seconds = time.perf_counter() - started
    return {"first": first, "seconds": seconds, "reward": result.reward, "info": result.info, "steps": steps}


def left(temporary: Path, programs: Path) -> list[str]:
    """Return the processes of the clients that still run, and episodes' folders that are still there."""
    commands = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    processes = [one for one in commands if one == "sleep 1000" or one.startswith(str(programs))]
    return processes + [path.name for path in temporary.glob("episode-*")]


class Recorded(TextEnvironment):
    """Stands for episodes that are already played."""

    def reset(self, **task):
        return Observation("nothing")

    def step(self, action):
        return StepResult("nothing", terminated=True)


def make_trainer(tokenizer: Path, layout: str, output: Path, **played_by: Any) -> G2POTrainer:
    """Return a trainer of a small random model, whose advantages do not depend on rewards."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(words), num_key_value_heads=1, max_position_embeddings=65536, tie_word_embeddings=True, **sizes
    )
    args = G2POConfig(
        str(output),
        num_generations=EPISODES,
        per_device_train_batch_size=EPISODES,
        steps_per_generation=1,
        max_steps=1,
        max_turns=len(NOTES) + 1,
        max_prompt_length=60_000,
        max_completion_length=16,
        max_tokens_per_micro_batch=MICRO_BATCH,
        max_grad_norm=0.0,
        token_layout=layout,
        environment_step_timeout=1200,
        environment_reset_timeout=1200,
        report_to="none",
        use_cpu=True,
        bf16=False,  # of a CPU, slow and inexact
        seed=0,
        beta=0.0,
        save_strategy="no",
        disable_tqdm=True,
    )
    return G2POTrainer(
        Qwen2ForCausalLM(config),
        args,
        Dataset.from_list([{"task": "Fix the test"}] * 2),
        processing_class=words,
        advantage_fn=lambda graph: np.linspace(-1, 1, graph.num_steps),
        **played_by,
    )


def play_by_model(agent: AgentCommand, tokenizer: Path, output: Path) -> tuple[Rollout, dict[str, float]]:
    """Play four episodes, whose first turns are written in place of the model, and train on them."""
    trainer = make_trainer(tokenizer, "shared", output, agent=agent)
    engine, words, played = trainer.player.actor.engine, trainer.processing_class, []
    generate, collect, number = engine.generate, trainer.strategy.collect, itertools.count()

    def write(prompts, sampling, seeds=None):
        made = []
        for prompt in prompts:
            text = words.decode(prompt)
            turn = sum(note in text for note in NOTES)
            if turn == len(NOTES):
                made += generate([prompt], sampling, seeds)
                continue
            kind = "exec_command" if "exec_command" in text else "Bash"
            line = f"echo {NOTES[turn]}; {'cat add.py' if turn == next(number) % 2 else 'date; ls'}"
            call = json.dumps(shell(kind, line)["function"])
            made.append(Completion(words(f"<tool_call>\n{call}\n</tool_call><|im_end|>")["input_ids"]))
        return made

    engine.generate = write
    trainer.strategy.collect = lambda *given: played.append(collect(*given)) or played[0]
    logged = train(trainer)
    return played[0], logged


def train(trainer: G2POTrainer) -> dict[str, float]:
    """Make one training step; return what was logged."""
    trainer.train()
    trainer.close()
    (logged,) = (line for line in trainer.state.log_history if "loss" in line)
    return {key: value for key, value in logged.items() if isinstance(value, (int, float))}


class Gradient(TrainerCallback):
    """Keeps the gradient of the last optimizer step, and when it was ready, in seconds of CPU time."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.ready = time.process_time()
        self.found = {name: p.grad.clone().numpy() for name, p in model.named_parameters() if p.grad is not None}


def update(layout: str | None, rollout: Rollout, tokenizer: Path, output: Path) -> dict[str, Any]:
    """Train on recorded episodes; return positions, seconds of CPU time, memory in MiB and the gradient.

    Without a layout, each step sample passes by itself through the model's own `forward`, and the loss is written out.
    """
    trainer = make_trainer(tokenizer, layout or "padded", output, environment_factory=Recorded)
    gradient, begun = Gradient(), []

    def collect(*given: Any) -> Rollout:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        begun.extend([time.process_time(), memory("VmRSS")])
        return rollout

    if layout is None:
        positions = one_by_one(trainer.model, collect())
        gradient.on_pre_optimizer_step(None, None, None, model=trainer.model)
        trainer.close()
    else:
        trainer.add_callback(gradient)
        trainer.strategy.collect = collect
        positions = int(train(trainer)["update/forwarded_tokens"])
    seconds = gradient.ready - begun[0]
    peak = memory("VmHWM") - begun[1]
    return {"positions": positions, "seconds": seconds, "memory": peak, "gradient": gradient.found}


def one_by_one(model: torch.nn.Module, rollout: Rollout) -> int:
    """Add the gradient of the token mean of GRPO's loss by plain forward passes; return the tokens passed."""
    steps = [step for played in rollout.trajectories for step in played.steps if played.counted]
    tokens, positions = sum(len(step.completion_ids) for step in steps), 0
    for step in (step for step in steps if step.advantage):
        ids, length = torch.tensor([[*step.prompt_ids, *step.completion_ids]]), len(step.completion_ids)
        logits = model(input_ids=ids, logits_to_keep=length + 1).logits[0, :-1].float()
        (-step.advantage / tokens * logits.log_softmax(-1)[range(length), ids[0, -length:]].sum()).backward()
        positions += ids.shape[1]
    return positions


def memory(name: str) -> float:
    """Return a size of this process in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def compare(rollout: Rollout, tokenizer: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Make the update in each layout, each in a process of its own, and compare the gradients."""
    layouts = {"one by one": None, "padded": "padded", "shared": "shared"}
    with ProcessPoolExecutor(len(layouts), get_context("spawn"), max_tasks_per_child=1) as processes:
        made = {n: processes.submit(update, of, rollout, tokenizer, folder / n) for n, of in layouts.items()}
        found = {name: one.result() for name, one in made.items()}
    wanted = found["one by one"]["gradient"]
    for one in found.values():
        own = one.pop("gradient")
        one["largest gradient"] = float(max(abs(of).max() for of in own.values()))
        one["largest difference"] = float(max(abs(own[name] - of).max() for name, of in wanted.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--tokenizer", type=Path, help="of the random model; without it nothing is trained")
    parser.add_argument("--clients", nargs="+", default=["claude", "codex"])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    results: dict = {}
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = name  # of episodes' folders, too
        workspace = Path(name) / "workspace"
        workspace.mkdir()
        for file, text in FILES.items():
            (workspace / file).write_text(text)
        for client in args.clients:
            agent, hurried = (command(client, args.bin.resolve(), workspace, seconds) for seconds in (600, 60))
            results[client] = {
                script: play(hurried if script == "hangs" else agent, lines) for script, lines in SCRIPTS.items()
            }
            for script, one in results[client].items():
                why = one["info"].get("failure_reason", "")
                sizes = [step["characters"] for step in one["steps"]]
                print(
                    f"{client} {script:16} reward {one['reward']} {one['seconds']:5.1f} s  {sizes} {why}", flush=True
                )
            results[client]["left"] = left(Path(name), args.bin.resolve())
            print(f"{client} leaves {results[client]['left']}", flush=True)
            keys = [[step["key"] for step in results[client][script]["steps"]] for script in ("fixes", "fixes again")]
            print(f"{client} states of the two that fix are equal: {keys[0] == keys[1]}", flush=True)
            if args.tokenizer:
                rollout, logged = play_by_model(agent, args.tokenizer, Path(name) / client)
                results[client]["training"] = logged
                results[client]["layouts"] = compare(rollout, args.tokenizer, Path(name) / client)
                shown = {
                    key: logged[key] for key in ("loss", "grad_norm", "rollout/steps", "rollout/mean_prompt_tokens")
                }
                print(f"{client} trained: {shown}", flush=True)
                for layout, one in results[client]["layouts"].items():
                    print(f"{client} {layout}: {one}", flush=True)
    write_results(args.output, {**facts("torch", "transformers"), "clients": results}, "coding_agents.json")


if __name__ == "__main__":
    from benchmarks.speed import coding_agents  # under this name, other processes find its classes

    coding_agents.main()
