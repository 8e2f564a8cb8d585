"""Coding agents of others, unchanged: what they send, and what is left of them.

    npm install @anthropic-ai/claude-code @openai/codex
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --output FOLDER
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --output FOLDER --tokenizer tokenizer.json

A folder has a function with a wrong operator, and a test. A script in place of a model fixes it through the agent's
shell, twice, then has sub-agents ask in parallel, hangs the shell, kills the agent, and leaves processes. Prints and
writes the command, the machine and every value. With a tokenizer, it measures instead how many tokens the prompts of
two episodes share at their beginning, in folders of their own and at one path. The training iteration in
results/agents was made by this script at commit `d95407c5`.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psutil
import trl
from transformers import PreTrainedTokenizerFast

from benchmarks.common import facts, write_results
from g2po_trl import AgentCommand, AgentEnvironment
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
    "kills its supervisor": ["(setsid sleep 1000 &) ; kill -9 $(ps -o ppid= -p $PPID)"],
    "asks in parallel": [("one", "two"), *[None] * 5],
}
ONE_PATH = [  # before a command, as in docs/agents.md
    *("unshare", "--user", "--map-current-user", "--mount", "--keep-caps", "sh", "-c"),
    'mount --bind "$EPISODE_FOLDER" /mnt && cd /mnt/workspace && HOME=/mnt/home TMPDIR=/mnt/tmp '
    'exec unshare --user --map-current-user "$0" "$@"',
]


def command(
    name: str, folder: Path, workspace: Path, timeout: float = 600, prefix: tuple = (), **more
) -> AgentCommand:
    """Return a client as docs/agents.md runs it; `more` are options of `AgentCommand`."""
    options = {
        "workspace": workspace,
        "restore": ["test_*.py"],
        "verify": "python -m pytest -q -p no:cacheprovider",
        "timeout": timeout,
        "verify_timeout": 60,
        **more,
    }
    if name == "claude":
        words = [str(folder / "claude"), "-p", "{task}", "--allowedTools", "Bash"]
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
        return AgentCommand([*prefix, *words], environment=quiet, **options)
    if name == "mini":
        words = [str(folder / "mini"), "-y", "--exit-immediately", "-m", "openai/policy", "-t", "{task}"]
        quiet = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
        quiet["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        return AgentCommand([*prefix, *words], environment=quiet, **options)
    provider = (
        " -c model_provider=g2po -c model_providers.g2po.name=g2po -c model_providers.g2po.wire_api=responses"
        " -c model_providers.g2po.env_key=OPENAI_API_KEY -c model_providers.g2po.base_url=$OPENAI_BASE_URL"
    )
    line = f"{folder / 'codex'} exec --skip-git-repo-check --sandbox workspace-write -c allow_login_shell=false"
    return AgentCommand([*prefix, "sh", "-c", f'{line} -m $OPENAI_MODEL{provider} "$0"', "{task}"], **options)


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


def play(agent: AgentCommand, script: list[str | None], requests: list | None = None) -> dict:
    """Play one episode by a script of shell commands; `None` ends it. Requests are added to `requests`."""
    environment, started = AgentEnvironment(agent, max_turns=10), time.perf_counter()
    steps, lines, result = [], list(script), None
    seen = environment.reset(task="Fix the test")
    first = time.perf_counter() - started
    while result is None or not (result.terminated or result.truncated):
        request = seen.request
        if requests is not None:
            requests.append(request)
        steps.append(
            {
                "characters": len(json.dumps([request.messages, request.tools])),
                "tools": len(request.tools or ()),
                "news": seen.text[:300],
                "key": seen.state_key,
            }
        )
        calls = tuple(calls_of(request.tools or [], lines.pop(0) if lines else None))
        response = ChatResponse("" if calls else "Done.", calls, "tool_calls" if calls else "stop")
        result = environment.step(response.to_action())
        seen = result.observation
    environment.close()
    seconds = time.perf_counter() - started
    return {"first": first, "seconds": seconds, "reward": result.reward, "info": result.info, "steps": steps}


def shared_tokens(agent: AgentCommand, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Return rewards of two equal episodes, and for each call the tokens of their prompts and how many are common."""
    rewards, prompts = [], []
    for _ in range(2):
        rewards.append(play(agent, SCRIPTS["fixes"], requests := [])["reward"])
        rendered = [tokenizer.apply_chat_template(one.messages, tools=one.tools, tokenize=False) for one in requests]
        prompts.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered])
    common = [len(os.path.commonprefix(pair)) for pair in zip(*prompts)]
    return {"rewards": rewards, "tokens": [list(map(len, one)) for one in prompts], "common": common}


def left(temporary: Path, programs: Path) -> list[str]:
    """Return the processes of the clients that still run, and episodes' folders that are still there."""
    commands = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    processes = [one for one in commands if one == "sleep 1000" or one.startswith(str(programs))]
    return processes + [path.name for path in temporary.glob("episode-*")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--clients", nargs="+", default=["claude", "codex"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="measures shared tokens instead")
    args = parser.parse_args()
    results: dict = {}
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = name  # of episodes' folders, too
        workspace = Path(name) / "workspace"
        workspace.mkdir()
        for file, text in FILES.items():
            (workspace / file).write_text(text)
        if args.tokenizer:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.tokenizer))
            tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
            paths = {"own folders": (), "one path": tuple(ONE_PATH)}
            for client in args.clients:
                made = {n: command(client, args.bin.resolve(), workspace, prefix=one) for n, one in paths.items()}
                results[client] = {name: shared_tokens(agent, tokenizer) for name, agent in made.items()}
                print(client, results[client], flush=True)
            write_results(args.output, {**facts(), "clients": results}, "one_path.json")
            return
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
    write_results(args.output, {**facts(), "clients": results}, "coding_agents.json")


if __name__ == "__main__":
    main()
