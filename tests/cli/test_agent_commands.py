"""The commands with `--agent`: what each finds in a file, reports and refuses, and a folder of `g2po init --agent`."""

import re
import subprocess
import sys
from textwrap import indent

import pytest
from chat_server import chat_completion, chat_server
from imported_files import forget
from refusals import refused
from run_g2po import outcome

from g2po_trl import PoolLimits
from g2po_trl.check.examine import Examination
from g2po_trl.cli.commands.init import FILES
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.recipe_files import RECIPES
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.loading import resolve_agent_name
from g2po_trl.environments.setup import agent_factory

ASKS = """
import json, os, time, urllib.request

def ask(client, text, **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {client.api_key}"}
    request = urllib.request.Request(client.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the functions of an agent into agent.py of the current folder."""
    monkeypatch.chdir(tmp_path)

    def write_agent(body, name="agent.py", head=ASKS):
        forget()
        (tmp_path / name).write_text(head + body)
        return name

    return write_agent


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    code, said, _ = outcome(capsys, "init", str(tmp_path / "house"), "--agent")
    assert code == 0 and said.endswith("&& g2po check\n")
    monkeypatch.chdir(tmp_path / "house")
    return tmp_path / "house"


def test_what_is_an_agent(write, tmp_path):
    file = f"{tmp_path}/agent.py"
    write("def _mine(task, client): pass\ndef other(a, b): pass\nasync def walk(task, client, depth=3): pass\n")
    assert resolve_agent_name("agent.py") == resolve_agent_name("agent.py:walk") == f"{file}:walk"
    write("import g2po_trl as g\nsolve: object = g.AgentCommand('python solve.py', verify=lambda task: 0)\n")
    assert resolve_agent_name("agent.py") == f"{file}:solve"
    assert resolve_agent_name("package.module:walk") == "package.module:walk"
    write("def one(task, client): pass\ndef two(task, client): pass\n")
    for name in ("agent.py", "agent.py:three", "http://localhost:1", "agent"):
        with refused("agent"):
            resolve_agent_name(name)


def test_train_takes_an_agent(folder):
    script = RECIPES / "train_environment.py"
    words = ["--agent", f"{folder}/agent.py:tidy"]
    assert resolve(read(["--agent", "agent.py", "--seed", "1"])) == (script, [*words, "--seed", "1"])
    assert resolve(read([])) == resolve(read(["--agent=agent.py:tidy"])) == (script, words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --agent empty.py", "it contains no public function (task, client)"),
        ("train alfworld --agent agent.py", "agent is 'agent.py'"),
        ("check agent.py", "it contains no TextEnvironment"),
        ("check a.py --agent agent.py", "agent is 'agent.py'"),
        ("check a.py --response yes", "response has"),
        ("check --base-url http://127.0.0.1:9/v1", "base_url has"),
        ("check --model m --response yes", "response is"),
        ("check --max-episode-tokens 9", "max_episode_tokens is"),
        ("check --model ./nothing", "model is"),
        ("init . --agent", "already holds agent.py, tasks.jsonl"),
    ],
)
def test_errors_name_the_option(folder, capsys, words, told):
    (folder / "empty.py").write_text("x = 1\n")
    code, _, errors = outcome(capsys, *words.split())
    assert code and told in errors and "Traceback" not in errors, errors


def test_what_init_writes_is_good(folder, capsys):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES["agent"], "model"])
    code, said, _ = outcome(capsys, "check")
    *lines, following = said.splitlines()
    assert code == 0 and {line.split()[0] for line in lines} == {"ok"}, said
    assert "there is a graph to learn from" in said
    assert following == "Next: g2po teach --agent agent.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "7 passed" in run.stdout, run.stdout


PORT = (  # as one that is fixed, of this file alone
    "\nimport socket\nserver = socket.socket(socket.AF_UNIX)\ndef bind():\n"
    "    server.getsockname() or server.bind(chr(0) + __file__[-80:])\n"
)
# What `check` says of an agent, and what the agent does.
FINDINGS = r"""
error FAILED: returned 1.0
return 1.0

warning RAISED_IN_AGENT: ValueError: invalid literal for int() with base 10: 'yes'
return int(ask(client, 'a')) + int(ask(client, 'b'))

error NOT_REPLAYED: Address already in use
bind()
return ask(client, 'a') == ask(client, 'b')

warning ONE_CALL
return ask(client, 'a') == 'yes'

warning TOO_MANY_CALLS
while True:
    ask(client, 'a')

error NOT_REPLAYED: at step 1
ask(client, str(os.getpid()))
return ask(client, 'b') == 'yes'

warning KEYS: 0.5 0.5 1.0
ask(client, 'a')
return ask(client, f'b took {time.time_ns()}.5 seconds') == 'yes'

warning REFUSED_REQUESTS: n is 2
try:
    ask(client, 'a', n=2)
except OSError:
    pass
return ask(client, 'a') == 'yes' or ask(client, 'b') == 'yes'
"""


@pytest.mark.parametrize("finding", FINDINGS.strip().split("\n\n"), ids=lambda finding: finding.partition("\n")[0])
def test_check_finds(finding, write):
    head, _, body = finding.partition("\n")
    head, _, fact = head.partition(": ")
    level, kind = head.split()
    write(f"def agent(task, client):\n{indent(body, '    ')}\n" + PORT * ("bind()" in body))
    limits = PoolLimits(environment_step_timeout=20)
    examination = Examination(agent_factory("agent.py", 4), [{}], episode_limits=EpisodeLimits(4), limits=limits)
    found = {one.kind.name: one for one in examination.at_random()}
    assert found[kind].level == level and fact in " ".join(map(str, found[kind].facts.values())), found


def test_responses_and_state_keys_of_ones_own(write, capsys):
    write(
        "def key(messages): return 'same'\n"
        "def agent(task, client):\n"
        "    said = [ask(client, f'{os.urandom(4)!r}') for _ in range(3)]\n"
        "    assert set(said) <= {'left', 'right'}, said\n"
        "    return said == ['left'] * 3\n"
    )
    command = ["check", "--agent", "agent.py", "--response", "left", "--response", "right"]
    said = outcome(capsys, *command, "--episodes", "16")[1]
    assert "equal keys" in said and "random responses succeed in " in said and "raises" not in said
    said = outcome(capsys, *command, "--agent-state-key", "agent.py:key")[1]
    assert "groups have one state only" in said


@pytest.fixture
def server():
    """A server that always says "yes", cut off."""
    with chat_server(lambda body, headers: (200, chat_completion("yes", "length"))) as server:
        yield server


def test_check_plays_with_a_model(write, tiny_model_dir, server, tmp_path, capsys):
    write(
        "def agent(task, client):\n    said = [ask(client, text, temperature=0) for text in 'ab']\n"
        "    return task['pays']\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"pays": 0}\n{"pays": 1}\n{"pays": 9}\n')
    (tmp_path / "config.yaml").write_text("max_completion_length: 4\nmax_turns: 6\ntemperature: 0.5\n")
    found = [
        "episodes of a task visit a state 4.0 times",
        "the model's responses succeed in 4 of 8 episodes; 8 end within 6 turns; rewards from 0 to 1.",
    ]
    code, said, errors = outcome(capsys, "check", "--model", str(tiny_model_dir))
    assert code == 0 and all(line in said for line in found), said + errors
    assert re.search(r"prompts have at most \d+ tokens, completions [1-4] \(median\)", said)
    assert said.endswith(f"Next: g2po train --agent agent.py --model {tiny_model_dir}\n")

    pytest.importorskip("openai")
    code, said, errors = outcome(capsys, "check", "--model", "m", "--base-url", server.url)
    assert code == 0 and all(line in said for line in found), said + errors
    limited = "prompts have at most 7 tokens, completions 3 (median); 100% of them reach the limit. Raise"
    assert f"warning   {limited}" in said
    assert len(server.asked) == 16 and {(b["temperature"], b["max_tokens"]) for b in server.asked} == {(0.5, 4)}
    assert said.endswith("Next: g2po train --agent agent.py --model MODEL\n"), "config.yaml names none"
    (tmp_path / "keys.py").write_text("def key(messages):\n    return messages[-1]['content']\n")
    said = outcome(capsys, "check", "--tasks", "tasks.jsonl", "--agent-state-key", "keys.py:key")[1]
    assert said.endswith("--agent agent.py --tasks tasks.jsonl --agent-state-key keys.py:key --model MODEL\n")


def test_check_with_a_model_reports_failures(write, server, capsys):
    pytest.importorskip("openai")
    write("def agent(task, client):\n    ask(client, 'a')\n    raise KeyError(ask(client, 'b'))\n")
    code, said, errors = outcome(capsys, "check", "--model", "m", "--base-url", server.url, "--episodes", "3")
    told = "error     raises KeyError: 'yes', agent.py, line 13 in 3 of 3 episodes"
    assert code == 1 and said.startswith(told), said + errors
