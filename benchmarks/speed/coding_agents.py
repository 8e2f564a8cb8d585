"""Coding agents of others, unchanged: what they send, what they cost, and one training iteration on it.

    npm install @anthropic-ai/claude-code @openai/codex
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --tokenizer FOLDER --output FOLDER

A folder has a function with a wrong operator, and a test. A script in place of a model fixes it through the agent's
shell, twice, then hangs the shell, kills the agent, and answers nonsense. Then a model of two layers with random
weights plays four episodes, and one update is made from them, in the layouts `padded` and `shared`: the same gradient,
other positions and seconds. Prints and writes the command, the machine and every value.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import facts, write_results
from g2po_trl import AgentCommand, AgentEnvironment, G2POConfig, G2POTrainer
from g2po_trl.prompts.conversation import ChatResponse

FILES = {
    "add.py": "def add(a, b):\n    return a - b\n",
    "test_add.py": "from add import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
FIX = "sed -i 's/a - b/a + b/' add.py && date && echo fixed"
SCRIPTS = {
    "fixes": [FIX, None],
    "fixes again": [FIX, None],
    "answers at once": [None],
    "hangs": ["sleep 1000"],
    "is killed": ["pkill -9 -f 'Fix the test'"],
    "leaves processes": ["(setsid sleep 1000 &) ; echo left", None],
}


def command(name: str, folder: Path, workspace: Path) -> AgentCommand:
    """Return a client as docs/agents.md runs it."""
    options = {
        "workspace": workspace,
        "restore": ["test_*.py"],
        "verify": "python -m pytest -q -p no:cacheprovider",
        "timeout": 60,
        "verify_timeout": 60,
    }
    if name == "claude":
        words = [str(folder / "claude"), "-p", "{task}", "--allowedTools", "Bash"]
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return AgentCommand(words, environment=quiet, **options)
    provider = (
        " -c model_provider=g2po -c model_providers.g2po.name=g2po -c model_providers.g2po.wire_api=responses"
        " -c model_providers.g2po.env_key=OPENAI_API_KEY -c model_providers.g2po.base_url=$OPENAI_BASE_URL"
    )
    line = f"{folder / 'codex'} exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check"
    return AgentCommand(["sh", "-c", f'{line} -m $OPENAI_MODEL{provider} "$0"', "{task}"], **options)


def shell(tools: list[dict], line: str) -> dict:
    """Return the call by which an agent runs a command."""
    names = [tool["function"]["name"] for tool in tools]
    name = "Bash" if "Bash" in names else "exec_command"
    arguments = {"command": line, "description": "Run"} if name == "Bash" else {"cmd": line}
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
        line = lines.pop(0) if lines else None
        calls = () if line is None else (shell(request.tools, line),)
        result = environment.step(
            ChatResponse("" if calls else "Done.", calls, "tool_calls" if calls else "stop").to_action()
        )
        seen = result.observation
    environment.close()
    seconds = time.perf_counter() - started
    return {"first": first, "seconds": seconds, "reward": result.reward, "info": result.info, "steps": steps}


def train(name: str, folder: Path, workspace: Path, tokenizer: Path, layout: str, output: Path) -> dict:
    """Play four episodes with a small random model, and make one update; return what was logged."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(words), num_key_value_heads=2, max_position_embeddings=65536, tie_word_embeddings=True, **sizes
    )
    args = G2POConfig(
        str(output),
        num_generations=4,
        per_device_train_batch_size=4,
        steps_per_generation=1,
        max_steps=1,
        max_turns=3,
        max_prompt_length=60_000,
        max_completion_length=16,
        max_tokens_per_micro_batch=70_000,
        token_layout=layout,
        environment_step_timeout=120,
        environment_reset_timeout=120,
        report_to="none",
        use_cpu=True,
        seed=0,
        beta=0.0,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = G2POTrainer(
        Qwen2ForCausalLM(config),
        args,
        Dataset.from_list([{"task": "Fix the test"}] * 2),
        agent=command(name, folder, workspace),
        processing_class=words,
        advantage_fn=lambda graph: np.linspace(-1, 1, graph.num_steps),
    )
    trainer.train()
    (logged,) = (line for line in trainer.state.log_history if "loss" in line)
    return {key: value for key, value in logged.items() if isinstance(value, (int, float))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--tokenizer", type=Path, help="of the random model; without it nothing is trained")
    parser.add_argument("--clients", nargs="+", default=["claude", "codex"])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    results: dict = {}
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name) / "workspace"
        workspace.mkdir()
        for file, text in FILES.items():
            (workspace / file).write_text(text)
        for client in args.clients:
            agent = command(client, args.bin.resolve(), workspace)
            results[client] = {script: play(agent, lines) for script, lines in SCRIPTS.items()}
            for script, one in results[client].items():
                why = one["info"].get("failure_reason", "")
                sizes = [step["characters"] for step in one["steps"]]
                print(
                    f"{client} {script:16} reward {one['reward']} {one['seconds']:5.1f} s  {sizes} {why}", flush=True
                )
            keys = [[step["key"] for step in results[client][script]["steps"]] for script in ("fixes", "fixes again")]
            print(f"{client} states of the two that fix are equal: {keys[0] == keys[1]}", flush=True)
            for layout in ("padded", "shared") if args.tokenizer else ():
                output = Path(name) / f"{client}-{layout}"
                logged = train(client, args.bin.resolve(), workspace, args.tokenizer, layout, output)
                results[client][layout] = logged
                shown = {key: logged[key] for key in ("loss", "grad_norm", "episode/num_steps") if key in logged}
                times = {key: round(value, 2) for key, value in logged.items() if key.startswith(("time/", "tokens/"))}
                print(f"{client} {layout}: {shown} {times}", flush=True)
    write_results(args.output, {**facts("torch", "transformers"), "clients": results}, "coding_agents.json")


if __name__ == "__main__":
    main()
