"""`g2po check --agent`: what it finds in a file, in random episodes and in those of a model."""

from textwrap import indent

import pytest
from chat_server import chat_completion, chat_server
from imported_files import forget
from refusals import refused
from run_g2po import outcome

from g2po_trl import PoolLimits
from g2po_trl.check.examine import Examination
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.loading import resolve_agent_name
from g2po_trl.environments.setup import agent_factory

ASKS = """
import json, os, pathlib, tempfile, time, urllib.request
from g2po_trl.agents.workspace import Workspace

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

    def write_agent(body):
        forget()
        (tmp_path / "agent.py").write_text(ASKS + body)

    return write_agent


def test_what_is_an_agent(write, tmp_path):
    file = f"{tmp_path}/agent.py"
    write("def _mine(task, client): pass\ndef other(a, b): pass\nasync def walk(task, client, depth=3): pass\n")
    assert resolve_agent_name("agent.py") == resolve_agent_name("agent.py:walk") == f"{file}:walk"
    write("import g2po_trl as g\nsolve: object = g.AgentCommand('python solve.py', verify=lambda task: 0)\n")
    assert resolve_agent_name("agent.py") == f"{file}:solve"
    write("def one(task, client): pass\ndef two(task, client): pass\n")
    for name in ("agent.py", "agent.py:three", "http://localhost:1", "agent"):
        with refused("agent"):
            resolve_agent_name(name)


# What `check` says of an agent, and what the agent does.
FINDINGS = r"""
error FAILED: returned 1.0
return 1.0

warning RAISED_IN_AGENT: agent.py, line 13
return int(ask(client, 'a')) + int(ask(client, 'b'))

warning TOO_MANY_CALLS
while True:
    ask(client, 'a')

error NOT_REPLAYED: at step 1
ask(client, str(os.getpid()))
return ask(client, 'b') == 'yes'

warning KEYS: paths': 1.0
ask(client, 'a')
return ask(client, f'b took {time.time_ns()}.5 seconds') == 'yes'

warning PARTS: workspace': 1.0, 'files': 1.0, 'messages': 0.5} workspace
with tempfile.TemporaryDirectory() as name:
    client.works_on(Workspace(pathlib.Path(), pathlib.Path(name, 'copy')))
    return (ask(client, name), ask(client, f'b {time.time_ns()}'))[1] == 'yes'
"""


@pytest.mark.parametrize("finding", FINDINGS.strip().split("\n\n"), ids=lambda finding: finding.partition("\n")[0])
def test_check_finds(finding, write):
    head, _, body = finding.partition("\n")
    head, _, fact = head.partition(": ")
    level, kind = head.split()
    write(f"def agent(task, client):\n{indent(body, '    ')}\n")
    limits = PoolLimits(environment_step_timeout=20)
    examination = Examination(agent_factory("agent.py", 4), [{}], episode_limits=EpisodeLimits(4), limits=limits)
    found = {one.kind.name: one for one in examination.at_random()}
    assert level == found[kind].level == min({one.level for one in found.values()} - {"ok"}), found
    assert fact in " ".join(map(str, found[kind].facts.values())), found


def test_check_plays_with_a_model(write, tiny_model_dir, tmp_path, capsys):
    pytest.importorskip("openai")
    write(
        "def key(messages): return messages[-1]['content']\n"
        "def agent(task, client):\n"
        "    said = [ask(client, text, temperature=0) for text in 'ab']\n"
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
    assert said.endswith(f"Next: g2po train --agent agent.py --model {tiny_model_dir}\n")

    found += ["prompts have at most 7 tokens, completions 3 (median); 100% of them reach the limit. Raise"]
    with chat_server(lambda body, headers: (200, chat_completion("yes", "length"))) as server:
        words = f"check --model m --base-url {server.url} --tasks tasks.jsonl --agent-state-key agent.py:key"
        code, said, errors = outcome(capsys, *words.split())
    assert code == 0 and all(line in said for line in found), said + errors
    assert len(server.asked) == 16 and {(b["temperature"], b["max_tokens"]) for b in server.asked} == {(0.5, 4)}
    assert said.endswith("--agent agent.py --tasks tasks.jsonl --agent-state-key agent.py:key --model MODEL\n")
