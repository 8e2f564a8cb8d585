"""Coding agents of others, unchanged: what they send, and what is left of them.

    npm install @anthropic-ai/claude-code @openai/codex
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --output FOLDER
    python -m benchmarks.speed.coding_agents --bin node_modules/.bin --tokenizer tokenizer.json --output FOLDER

A folder has a function with a wrong operator, and a test. A script in place of a model fixes it through the agent's
shell, twice, then has sub-agents ask in parallel, hangs the shell, kills the agent, and leaves processes. Prints and
writes the command, the machine and every value. With a tokenizer, it measures instead how many tokens the prompts of
two episodes share at their beginning, in folders of their own and at one path. The commands are those of
docs/agents.md, Claude Code with all its tools. The training iteration in results/agents was made by this script at
commit `d95407c5`.
"""

import argparse
import ast
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil
import trl
from transformers import PreTrainedTokenizerFast

from benchmarks.common import facts, write_results
from g2po_trl import AgentCommand, AgentEnvironment
from g2po_trl.prompts.conversation import ChatResponse

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
ROW = re.compile(r"^\| [\w -]+ [\d.]+ \| `(\[.*\])` \|(.*)\|$", re.MULTILINE)
FILES = {
    "add.py": "def add(a, b):\n    return a - b\n",
    "test_add.py": "from add import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
FIX = "sed -i 's/a - b/a + b/' add.py && date && echo fixed"
FIXED = "add.py\n```\n{}```\n".format(FILES["add.py"].replace("-", "+"))  # as aider's model writes a file
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
SHELLS = ("Bash", "bash", "exec_command", "run_shell_command", "run_commands")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent's end


def documented() -> tuple[list[str], dict[str, dict]]:
    """Return the prefix for one path of docs/agents.md, and for each program there its options of `AgentCommand`."""
    code: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if re.search("^(claude|at_one_path|files) = ", block, re.MULTILINE):
            exec(block, code)
    words = [word for word in code["claude"].command if word not in ("--tools", "Bash,Edit,Read")]  # also sub-agents
    options = {"claude": {"command": words, "environment": code["claude"].environment}}
    for command, also in ROW.findall(PAGE):
        words = ast.literal_eval(command)
        name = words[2].split()[0] if words[0] == "sh" else words[0]
        variables = dict(pair.split("=") for pair in re.findall(r"`(\w+=\w+)`", also))
        options[name] = {"command": words, "environment": variables}
        options[name]["files"] = code["files"] if "`files`" in also else {}
    return code["at_one_path"], options


ONE_PATH, OPTIONS = documented()


def command(name: str, folders: list[Path], workspace: Path, timeout: float = 600, prefix=(), **more) -> AgentCommand:
    """Return a program as docs/agents.md runs it, found in `folders`; `more` are options of `AgentCommand`."""
    of = OPTIONS[name]
    path = os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {
        "workspace": workspace,
        "restore": ["test_*.py"],
        "verify": "python -m pytest -q -p no:cacheprovider",
        "timeout": timeout,
        "verify_timeout": 60,
        **of,
        "command": [*prefix, *of["command"]],
        "environment": {**of["environment"], "PATH": path},
        **more,
    }
    return AgentCommand(**options)


def response_to(request, line: str | tuple[str, ...] | None, is_fixed: bool) -> ChatResponse:
    """Return a response by which an agent runs a command, has sub-agents answer at the same time, or ends."""
    tools = request.tools or []
    names = [tool["function"]["name"] for tool in tools]
    shell = next((name for name in SHELLS if name in names), None)
    if isinstance(line, tuple):
        name = next(name for name in names if name == "Agent" or name.endswith("spawn_agent"))
        options = {"description": "Look"} if name == "Agent" else {}
        calls = [call_of(name, {"prompt" if options else "message": f"Look at {text}", **options}) for text in line]
    elif line is None and "submit_and_exit" in names:  # cline
        calls = [call_of("submit_and_exit", {"summary": "The operator is right now.", "verified": True})]
    elif line is None and any(SUBMIT in str(message["content"]) for message in request.messages):
        calls = [call_of("bash", {"command": SUBMIT})]
    elif line is None or shell is None:
        return ChatResponse("Done." if is_fixed else FIXED, (), "stop")
    else:
        wanted = next(tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == shell)
        given = {"cmd": line, "command": line, "commands": [line], "description": "Run", "is_background": False}
        calls = [call_of(shell, {name: given[name] for name in wanted["properties"] if name in given})]
    return ChatResponse("", tuple(calls), "tool_calls")


def call_of(name: str, arguments: dict) -> dict:
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
        takes = bool(request.tools) and bool(lines)  # a title is asked for without tools
        response = response_to(request, lines.pop(0) if takes else None, FIX not in lines)
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


def left(temporary: Path) -> list[str]:
    """Return the processes of episodes that still run, and episodes' folders that are still there."""
    found = [one.info for one in psutil.process_iter(["cmdline", "environ"])]
    of_episodes = [one for one in found if str(temporary) in (one["environ"] or {}).get("EPISODE_FOLDER", "")]
    return [" ".join(one["cmdline"]) for one in of_episodes] + [path.name for path in temporary.glob("episode-*")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, nargs="+", required=True, help="folders of the programs")
    parser.add_argument("--clients", nargs="+", choices=OPTIONS, default=["claude", "codex"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="measures shared tokens instead")
    args = parser.parse_args()
    folders, results = [folder.resolve() for folder in args.bin], {}
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = name  # of episodes' folders, too
        workspace = Path(name) / "workspace"
        workspace.mkdir()
        for file, text in FILES.items():
            (workspace / file).write_text(text)
        if args.tokenizer:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.tokenizer))
            tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
            paths = {"own folders": (), "one path": ONE_PATH}
            for client in args.clients:
                made = {n: command(client, folders, workspace, prefix=one) for n, one in paths.items()}
                results[client] = {name: shared_tokens(agent, tokenizer) for name, agent in made.items()}
                print(client, results[client], flush=True)
            write_results(args.output, {**facts(), "clients": results}, "one_path.json")
            return
        for client in args.clients:
            agent, hurried = (command(client, folders, workspace, seconds) for seconds in (600, 60))
            results[client] = {
                script: play(hurried if script == "hangs" else agent, lines) for script, lines in SCRIPTS.items()
            }
            for script, one in results[client].items():
                why = one["info"].get("failure_reason", "")
                sizes = [step["characters"] for step in one["steps"]]
                print(
                    f"{client} {script:16} reward {one['reward']} {one['seconds']:5.1f} s  {sizes} {why}", flush=True
                )
            results[client]["left"] = left(Path(name))
            print(f"{client} leaves {results[client]['left']}", flush=True)
            keys = [[step["key"] for step in results[client][script]["steps"]] for script in ("fixes", "fixes again")]
            print(f"{client} states of the two that fix are equal: {keys[0] == keys[1]}", flush=True)
    write_results(args.output, {**facts(), "clients": results}, "coding_agents.json")


if __name__ == "__main__":
    main()
