"""`g2po credit`, from a log to the page."""

import json

import numpy as np
import pytest
from logged_walks import LINE, conversations, write
from run_g2po import outcome
from viewing import data_in

from g2po_trl import read_jsonl


def test_the_command_from_a_log_to_the_page(tmp_path, capsys):
    file = write(tmp_path / "runs.jsonl", [*conversations(), {**LINE, "model": "m"}])
    options = ["--gamma", "0.5", "--estimator-kwargs", '{"edge_centric": false}']
    code, text, _ = outcome(capsys, "credit", file, *options)
    assert code == 0
    assert "3 episodes of 2 tasks (1 to 2 per task), 5 calls\n" in text
    assert "  fields that are not read: model (1)\n" in text
    # A_EP and A_NC of two values: ±1/sqrt(2) each.
    largest = '+1.41       1      2  mug            won           1  user: Find the mug.             go({"to": "kit'
    assert largest in text
    assert "states: 50.0% of calls are in a state that another episode of the task visited" in text
    folder = tmp_path / "runs-credit"
    lines = [json.loads(line) for line in (folder / "credit.jsonl").read_text().splitlines()]
    found = [line.pop("advantage") for line in lines[:4]]
    np.testing.assert_allclose(found, 2**-0.5 * np.array([2, 1, -2, -1]), rtol=1e-5)
    key = lines[1]["state_key"]
    assert key.startswith('[{"content": "", "role": "assistant", "tool_calls": ')
    assert lines[1] == {"task_id": "mug", "episode": "won", "call": 2, "value": 4.0, "visits": 1, "state_key": key}
    assert (lines[4]["episode"], lines[4]["advantage"]) == (3, None)
    written = list(read_jsonl(folder / "trajectories" / "train-000001.jsonl"))
    assert [t.group for t in written] == [0, 0, 1] and written[2].steps[0].advantage is None

    page = tmp_path / "page.html"
    assert outcome(capsys, "view", str(folder), "--output", str(page), "--no-open")[0] == 0
    shown = {name: json.loads(text) for name, text in data_in(page).items()}
    (group, alone), texts = shown["iteration-1"]["groups"], shown["iteration-1"]["texts"]
    steps = [step for trajectory in group["trajectories"] for step in trajectory["steps"]]
    assert [texts[step["o"]] for step in steps[1::2]] == ["tool: kitchen", "tool: cellar"]
    assert [step["trained"] for step in steps] == [1.4142, 0.7071, -1.4142, -0.7071]
    assert group["adds_up"] and not alone["stored"]
    assert shown["overview"]["sources"][0]["log"]["name"] == "runs.jsonl"

    assert outcome(capsys, "credit", file, "--estimator", "grpo")[0] == 0, "its own folder is replaced"
    described = json.loads((folder / "run.json").read_text())
    assert described["traces"] == {"file": file, "state_key": None}
    assert described["estimator"]["estimator_name"] == "grpo"


def test_a_state_key_and_grpo_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys_of_rooms.py").write_text("def indoors(messages):\n    return messages[-1]['role']\n")
    file = write(tmp_path / "runs.jsonl", conversations())
    code, text, _ = outcome(capsys, "credit", file, "--state-key", "keys_of_rooms.py:indoors", "--output", "out")
    assert code == 0 and "after an episode's first call 100.0%" in text and "--state-key" not in text
    assert json.loads((tmp_path / "out" / "run.json").read_text())["traces"]["state_key"] == "keys_of_rooms.py:indoors"
    code, text, _ = outcome(capsys, "credit", file, "--estimator", "grpo", "--output", "out")
    assert code == 0 and "first call 0.0%" in text and "--state-key" not in text, "keys make no difference to it"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--estimator", "gae"], 2, "invalid choice: 'gae'"),
        (["--estimator-kwargs", '{"edges": 1}'], 1, "has no 'edges'"),
        (["--gamma", "2"], 1, "gamma is 2"),
        *((["--state-key", key], 1, f"state_key is {key!r}") for key in ("similar:2", "json:__name__", "page")),
        (["--output", "run"], 1, "output is 'run'"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"trainer": {}}')
    file = write(tmp_path / "runs.jsonl", conversations())
    got, _, error = outcome(capsys, "credit", file, *options)
    assert got == code and message in error, error
    assert (tmp_path / "run" / "run.json").read_text() == '{"trainer": {}}'


def test_the_command_names_file_and_line(tmp_path, capsys):
    file = write(tmp_path / "runs.jsonl", [LINE, {**LINE, "reward": "high"}])
    code, _, error = outcome(capsys, "credit", file)
    assert code == 1 and f"{file}, line 2: reward is 'high'" in error
    assert "file is" in outcome(capsys, "credit", str(tmp_path / "none.jsonl"))[2]
    assert "error: calls is " in outcome(capsys, "credit", write(tmp_path / "empty.jsonl", []))[2]
    assert not (tmp_path / "runs-credit").exists() and not (tmp_path / "empty-credit").exists()
