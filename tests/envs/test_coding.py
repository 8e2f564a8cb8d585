"""The folder of `g2po init NAME --coding`: its repositories, its agent, and its bundled model's form of calls."""

import ast
import json
import random
import re
import subprocess
import sys

import pytest
from run_g2po import outcome
from scripted_agents import ASKING

from g2po_envs.tiny.coding_model import probabilities
from g2po_trl.agents.agent import AgentEnvironment
from g2po_trl.cli.commands.init import FILES, SOURCES
from g2po_trl.environments.loading import import_named, load
from g2po_trl.prompts.conversation import ChatResponse
from g2po_trl.prompts.tool_calls import make_tool_format

CODING = SOURCES["coding"]
REPOSITORIES = [json.loads(line) for line in (CODING / "repositories.jsonl").read_text().splitlines()]
HELD_OUT = 24  # the last four repositories, with six mistakes each


# It asks the model once, and puts what it says in place of the wrong sign.
FAKE = f"""{ASKING}
from pathlib import Path
said, file = ask(sys.argv[1]), Path("task.py")
file.write_text(file.read_text().replace("-=", said))
Path("test_task.py").write_text("")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    code, said, errors = outcome(capsys, "init", str(tmp_path / "fix"), "--coding")
    assert code == 0 and said.endswith("&& g2po check\n"), errors
    monkeypatch.chdir(tmp_path / "fix")
    return tmp_path / "fix"


def form(function):
    """Return what a function has in common with its copies in other names and with other constants."""
    names = {}
    for node in ast.walk(function):
        for field in {"name", "arg", "id"} & set(node._fields):
            setattr(node, field, names.setdefault(getattr(node, field), f"name{len(names)}"))
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return ast.dump(function)


def test_no_held_out_function_is_trained_on():
    forms = [{form(function) for function in ast.parse(one["task.py"]).body} for one in REPOSITORIES]
    assert set.union(*forms[:-HELD_OUT]).isdisjoint(set.union(*forms[-HELD_OUT:]))


def test_what_init_writes_is_good(folder, capsys):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES["coding"], "model"])
    tasks = [json.loads(line)["repository"] for line in (folder / "tasks.jsonl").read_text().splitlines()]
    assert tasks == [one["repository"] for one in REPOSITORIES]
    assert sorted(tasks) == sorted(path.name for path in (folder / "repositories").iterdir())
    trained, held_out = ({name.partition("-")[0] for name in part} for part in (tasks[:-HELD_OUT], tasks[-HELD_OUT:]))
    assert len(trained) == 16 and len(held_out) == 4 and trained.isdisjoint(held_out)
    assert f"num_eval_tasks: {HELD_OUT} " in (folder / "config.yaml").read_text()
    code, said, errors = outcome(capsys, "check")
    *lines, following = said.splitlines()
    assert code == 0 and "random responses succeed in 0 of" in said, said + errors
    assert {line.split()[0] for line in lines} <= {"ok", "warning"} and "there is a graph to learn from" in said, said
    assert following == "Next: g2po teach --agent agent.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_agent.py"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "7 passed" in run.stdout, run.stdout


def test_a_command_line_agent_as_in_the_readme(folder):
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    named = '"my-agent", "--prompt"'
    assert named in code
    (folder / "command.py").write_text(code.replace(named, f'"python", "{folder}/fake.py"'))
    (folder / "fake.py").write_text(FAKE)
    for said, reward in (("+=", 1.0), ("*=", 0.0)):
        environment = AgentEnvironment(load(f"{folder}/command.py:coder"), max_turns=2)
        environment.reset(repository="weather-2")
        end = environment.step(ChatResponse(said).to_action())
        environment.close()
        assert end.terminated and end.reward == reward, end
        assert f"+        total {said} value" in end.info["diff"] and "test_task.py" in end.info["diff"]
    assert "-= value" in (folder / "repositories" / "weather-2" / "task.py").read_text()


def test_the_bundled_model_writes_short_calls(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tools, form = load(f"{folder}/agent.py:TOOLS"), make_tool_format(tokenizer)
    assert form.native
    arguments = {"line": 14, "old": " - 1", "new": ""}
    call = {"type": "function", "function": {"name": "edit", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt
    ids = whole[len(prompt) : whole.index(tokenizer.eos_token_id, len(prompt)) + 1]
    assert len(ids) <= 24
    text = tokenizer.decode(ids)
    assert text == "<action>edit|line= 14|old= - 1|new=</action><|im_end|>"
    message, valid = form.parse(text, ids, prompt, tools)
    assert valid and message["tool_calls"] == [call]


def test_the_bundled_model_learns_the_probabilities_of_the_expert():
    agent = import_named(str(CODING / "agent.py"))
    code = " 1 def a(b, c):\n 2>     return b + c\n 5 def d(e):\n 6     return e < 1\n"
    seen = f"{code}undone: line 2: + is now -\n1 of 2 tests fail: assert a(1, 2) == 2"
    call = agent.expert([{"content": seen}], None, random.Random(0))
    chances = {tuple(one["arguments"].values()): chance for chance, one in probabilities(agent, seen, call, care=0.4)}
    assert chances == pytest.approx({(2, "+", "*"): 0.5, (2, "+", "-"): 0.1, (6, "<", "<="): 0.2, (6, "1", "0"): 0.2})
