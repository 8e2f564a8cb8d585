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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--estimator-kwargs", '{"edges": 1}'], "has no 'edges'"),
        (["--state-key", "similar:2"], "state_key is 'similar:2'"),
        (["--output", "run"], "output is 'run'"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"trainer": {}}')
    code, _, error = outcome(capsys, "credit", write(tmp_path / "runs.jsonl", conversations()), *options)
    assert code == 1 and message in error
    assert (tmp_path / "run" / "run.json").read_text() == '{"trainer": {}}'
