"""The folder of `g2po init NAME --coding`: its repositories, its agent, and its bundled model's form of calls."""

import ast
import json
import subprocess
import sys

import pytest
from run_g2po import outcome

from g2po_trl.cli.commands.init import FILES, SOURCES
from g2po_trl.environments.loading import load
from g2po_trl.prompts.tool_calls import make_tool_format

CODING = SOURCES["coding"]
REPOSITORIES = [json.loads(line) for line in (CODING / "repositories.jsonl").read_text().splitlines()]
HELD_OUT = 24  # the last four repositories, with six mistakes each


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
    assert f"num_eval_tasks: {HELD_OUT} " in (folder / "config.yaml").read_text()
    code, said, errors = outcome(capsys, "check", "--episodes", "2")
    assert code == 0 and {line.split()[0] for line in said.splitlines()} <= {"ok", "warning", "Next:"}, said + errors


@pytest.mark.slow
def test_the_tests_that_init_writes_pass(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_agent.py"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "7 passed" in run.stdout, run.stdout


def test_the_bundled_model_writes_short_calls(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tools, form = load(f"{folder}/agent.py:TOOLS"), make_tool_format(tokenizer)
    arguments = {"line": 14, "old": " - 1", "new": ""}
    call = {"type": "function", "function": {"name": "edit", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt
    ids = whole[len(prompt) : whole.index(tokenizer.eos_token_id, len(prompt)) + 1]
    text = tokenizer.decode(ids)
    assert len(ids) <= 24 and text == "<action>edit|line= 14|old= - 1|new=</action><|im_end|>"
    message, valid = form.parse(text, ids, prompt, tools)
    assert valid and message["tool_calls"] == [call]
