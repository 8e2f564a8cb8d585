"""Credit for logged runs: the three forms by hand, errors with line and remedy, and `g2po credit` from log to page."""

import base64
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from run_g2po import outcome

from g2po_trl import StateGraph, g2po, read_jsonl
from g2po_trl.credit.state_keys import merge_similar_keys
from g2po_trl.report.trace_credit import credit_traces, is_shared, rows, states
from g2po_trl.report.traces import trajectories_of_traces
from g2po_trl.rollout.words import action_text

ROOT = Path(__file__).parents[2]
SYSTEM = {"role": "system", "content": "You are a robot."}
TASK = {"role": "user", "content": "Find the mug."}


def call(place, number=0):
    function = {"name": "go", "arguments": json.dumps({"to": place})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{number}", "function": function}]}


def seen(place, number=0):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": place}


def conversation(*places, number=0):
    """Go to each place in turn; the last message is the last result."""
    return [SYSTEM, TASK] + [message for place in places for message in (call(place, number), seen(place, number))]


def as_calls(messages):
    return [{"messages": messages[:i], "response": m} for i, m in enumerate(messages) if m["role"] == "assistant"]


# Hall, kitchen, mug: 8. Hall, cellar, hall: 0. gamma 0.5: returns 2, 4 and 0, 0; V(start) = 1, V(kitchen) = 4,
# V(cellar) = 0. Not scaled: A_EP = ±4; A_NC = 4 - 2 and 0 - 2 at the start, 0 elsewhere; gains 3, 4, -1, 0 have mean
# 1.5.
PATHS = {"won": (8, ["kitchen", "mug"]), "lost": (0, ["cellar", "hall"])}
BY_HAND = [4 + 2 + 1.5, 4 + 0 + 2.5, -4 - 2 - 2.5, -4 + 0 - 1.5]


def conversations():
    return [
        {"task_id": "mug", "id": name, "reward": reward, "messages": conversation(*places, number=n)}
        for n, (name, (reward, places)) in enumerate(PATHS.items())
    ]


def episodes_of_calls():
    return [
        {"task": "mug", "id": line["id"], "reward": line["reward"], "calls": as_calls(line["messages"])}
        for line in conversations()
    ]


def single_calls():
    """Both episodes by turns; the reward is on the last line of each."""
    lines = [
        {"task_id": "mug", "episode_id": line["id"], **one}
        for pair in zip(*(as_calls(line["messages"]) for line in conversations()))
        for one, line in zip(pair, conversations())
    ]
    return [*lines[:2], {**lines[2], "reward": 8}, {**lines[3], "reward": 0.0}]


def unscaled(graph):
    return g2po(graph, scale_by_std=False)


@pytest.mark.parametrize("lines", [conversations(), episodes_of_calls(), single_calls()], ids=["1", "2", "3"])
def test_each_form_by_hand(lines):
    traces = trajectories_of_traces(map(json.dumps, lines))
    credit = credit_traces(traces, unscaled, gamma=0.5)
    assert credit.advantages.tolist() == BY_HAND
    told = [(row["episode"], row["call"], row["advantage"], row["value"], row["visits"]) for row in rows(credit)]
    assert told == [
        ("won", 1, 7.5, 1.0, 2),
        ("won", 2, 6.5, 4.0, 1),
        ("lost", 1, -8.5, 1.0, 2),
        ("lost", 2, -5.5, 0.0, 1),
    ]
    (group,) = traces.groups
    assert [t.outcome for t in group] == ["success", "failure"] and {t.task_id for t in group} == {"mug"}
    first, second = group[0].steps
    assert first.observation == "system: You are a robot.\n\nuser: Find the mug."
    assert (second.observation, action_text(second)) == ("tool: kitchen", 'go({"to": "mug"})')
    assert [[m["role"] for m in step.messages] for step in group[0].steps] == [["system", "user"], ["tool"]]
    news, asked = json.loads(second.state_key)
    assert news == {"content": "kitchen", "role": "tool"} and asked.keys() == {"asked"}
    assert not traces.unread and not traces.without_calls


def test_a_response_may_be_a_message_a_completion_or_a_text():
    responses = [
        {"content": "left", "reasoning_content": "because"},
        {"id": "x", "choices": [{"message": {"role": "assistant", "content": "left"}, "finish_reason": "length"}]},
        "left",
    ]
    calls = [{"messages": [TASK], "response": response, "seconds": 2.0} for response in responses]
    traces = trajectories_of_traces([{"task": {"n": 1}, "reward": 1, "calls": calls, "model": "m"}])
    (trajectory,) = traces.trajectories
    assert [action_text(step) for step in trajectory.steps] == ["left"] * 3
    assert [step.completion for step in trajectory.steps] == ["because\n\nleft", "left", "left"]
    assert [step.completion_truncated for step in trajectory.steps] == [False, True, False]
    assert (trajectory.task_id, trajectory.info) == ('{"n": 1}', {"episode": 1, "line": 1})
    assert traces.unread == Counter({"calls.seconds": 3, "model": 1})


def test_what_is_no_call_and_has_no_result_is_counted():
    greeting = {"role": "assistant", "content": "Hello!"}
    lines = [
        {"task_id": "a", "reward": None, "messages": [TASK, call("x")]},
        "",
        {"task_id": "a", "reward": -1, "success": True, "messages": [greeting, TASK, call("x"), call("y")]},
        {"task_id": "a", "reward": 0, "messages": [SYSTEM, TASK]},
        {"task_id": "b", "reward": 2, "messages": [TASK, call("x")]},
    ]
    traces = trajectories_of_traces(lines)
    assert [[t.outcome for t in group] for group in traces.groups] == [["error", "success"], ["success"]]
    assert traces.without_calls == 1
    second = traces.groups[0][1].steps[1]
    assert second.key == 'assistant: Hello!\n\nuser: Find the mug.\n\nassistant: go({"to": "x"})'
    credit = credit_traces(traces, unscaled, gamma=0.5)
    assert np.isnan(credit.advantages).all() and {step.advantage for step in credit.steps} == {None}
    assert [(row["value"], row["visits"]) for row in rows(credit)] == [(None, None), (-0.25, 1), (-0.5, 1), (1.0, 1)]
    assert states(credit).startswith("No task has two episodes with a result")


def test_states_of_other_episodes_alone_are_shared():
    """x is visited twice by one episode, y by two, z by one without a result and another."""
    paths = [(1, "xyxz"), (0, "y"), (None, "z")]
    calls = [
        {"task": "t", "reward": reward, "calls": [{"messages": [seen(c)], "response": "go"} for c in path]}
        for reward, path in paths
    ]
    graph = StateGraph.from_groups(trajectories_of_traces(calls).groups)
    assert is_shared(graph).tolist() == [False, True, False, False, True, False]


def test_a_state_key_takes_the_messages_of_the_request():
    def place(messages):
        return f"{len(messages)} {messages[-1]['content'][:1]}"

    traces = trajectories_of_traces(conversations(), place)
    assert [step.key for step in traces.trajectories[1].steps] == ["2 F", "4 c"]


@pytest.mark.parametrize(
    "empty", ["", "null", "OK.", "[]", '{"success": true}', "Observation: None", "exit code: 0\n"]
)
def test_a_call_without_a_result_is_part_of_the_state(empty):
    """Whatever was known before: the calls after it are in the state of one situation."""
    visits = {}
    for reward, *results in ((1, empty, "order 7", empty, "paid"), (0, empty, "order 7", "closed", empty)):
        messages = [TASK, *(m for n, text in enumerate(results) for m in (call(f"{text} {n}", n), seen(text, n)))]
        line = {"task_id": "t", "reward": reward, "messages": [*messages, call("end")]}
        for place, step in enumerate(trajectories_of_traces([line]).trajectories[0].steps):
            visits.setdefault(step.key, []).append(place)
    assert sorted(visits.values()) == [[0, 0], [1, 1], [2, 2], [3], [3], [4], [4]]


def test_who_is_asked_is_part_of_the_state():
    """The same question to another agent, by its system message or its tools, is another state."""
    tools = [[{"type": "function", "function": {"name": name}}] for name in ("look", "go")]
    asked = [({"role": "system", "content": name}, given) for name in "ab" for given in (*tools, tools[0] + tools[1])]
    lines = [
        {"task_id": "t", "reward": 1, "messages": [system, TASK, call("x"), seen("x"), call("y")], "tools": given}
        for system, given in asked
    ]
    calls = [{**line, "calls": [{"messages": line["messages"][:4], "response": "go"}]} for line in lines]
    for one in calls:
        del one["messages"]
    traces = trajectories_of_traces([*lines, *calls])
    assert not traces.unread
    keys = [trajectory.steps[-1].key for trajectory in traces.trajectories]
    assert len(set(keys)) == 6 and keys[:6] == keys[6:], "as live agents are keyed, in each form"
    merge_similar_keys(traces.trajectories, [0] * 12, 0.5)
    assert len({trajectory.steps[-1].key for trajectory in traces.trajectories}) == 6
    with pytest.raises(ValueError, match="tools is 'look'; give a list of JSON schemas"):
        trajectories_of_traces([{**LINE, "tools": "look"}])


def test_an_id_is_never_the_number_of_a_line():
    traces = trajectories_of_traces([{**LINE, "id": 2}, LINE, {**CALL, "episode_id": 2, "reward": 1}])
    assert [(t.info["episode"], len(t.steps)) for t in traces.trajectories] == [("2", 2), (2, 1)]


LINE = {"task_id": "t", "reward": 1, "messages": [TASK, call("x")]}
CALL = {"task_id": "t", "episode_id": "e", "messages": [TASK], "response": "ok"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"line 1: not valid JSON .*; write one object a line"),
        (["[1]"], r"line 1: \[1\] is not a JSON object"),
        (["[" * 100_000], "line 1: not valid JSON"),
        ([LINE, {"task_id": "t", "reward": 1}], "line 2: there is neither messages nor calls"),
        ([{**LINE, "calls": []}], "line 1: there are both calls and messages"),
        ([{**LINE, "response": "ok"}], "line 1: episode_id is missing; a call has"),
        ([{**LINE, "episode_id": "e"}], "line 1: response is missing; a call has"),
        ([{"reward": 1, "messages": [TASK]}], "line 1: task_id is missing"),
        ([{**LINE, "task_id": 0.5}], "line 1: task_id is 0.5; give a text or a whole number"),
        ([{"task_id": "t", "messages": [TASK]}], "line 1: reward is missing; give the episode's total reward"),
        ([{**LINE, "reward": "1"}], "line 1: reward is '1'; give a finite number"),
        (['{"task_id": "t", "reward": NaN, "messages": []}'], "line 1: reward is nan"),
        ([{**LINE, "reward": 10**400}], "line 1: reward is 10+"),
        ([{**LINE, "success": 1}], "line 1: success is 1; give true or false"),
        ([{**LINE, "messages": []}], r"line 1: messages is \[\]; give a list of chat messages"),
        ([{**LINE, "messages": [TASK, {"role": "robot"}]}], r"line 1: messages\[1\]: role is 'robot'; give one of"),
        ([{**LINE, "id": "e"}, LINE, {**LINE, "id": "e"}], "line 3: id is 'e', as on line 1 of the same task"),
        ([{"task": "t", "reward": 1, "calls": 3}], "line 1: calls is 3; give a list"),
        ([{"task": "t", "reward": 1, "calls": [{"messages": [TASK]}]}], r"line 1: calls\[0\] is .*; give an object"),
        (
            [{"task": "t", "reward": 1, "calls": [{"messages": [3], "response": "ok"}]}],
            r"line 1: calls\[0\]\.messages\[0\] is 3",
        ),
        ([CALL], "line 1: no line of the episode 'e' of task 't' has a reward"),
        (
            [{**CALL, "reward": 0}, {**CALL, "reward": 1}],
            "line 2: reward is 1, but 0 on an earlier line of the same episode",
        ),
        ([{**CALL, "response": TASK}], "line 1: response is .*; give the assistant's message"),
        ([{**CALL, "response": {"choices": []}}], r"line 1: response\.choices is \[\]; give the one choice"),
        ([{**CALL, "episode_id": None}], "line 1: episode_id is None; give a text"),
    ],
)
def test_errors_name_line_field_and_remedy(lines, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        trajectories_of_traces(lines)


def test_arguments_without_an_end_are_text():
    """Small models repeat themselves."""
    message = call("x")
    message["tool_calls"][0]["function"]["arguments"] = endless = "[" * 100_000
    (trajectory,) = trajectories_of_traces([{**LINE, "messages": [TASK, message]}]).trajectories
    assert endless in trajectory.steps[0].action


def test_errors_of_a_state_key_name_the_line():
    with pytest.raises(ValueError, match="^line 1: state_key returned None; return a text or JSON data"):
        trajectories_of_traces([LINE], lambda messages: None)
    with pytest.raises(ValueError, match="^line 1: state_key raised KeyError: 'page'"):
        trajectories_of_traces([LINE], lambda messages: messages[0]["page"])


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def data_in(page):
    """Return the data in the viewer's page by name."""
    blocks = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]+)</script>', page.read_text(encoding="utf-8"))
    return {name: json.loads(gzip.decompress(base64.b64decode(block))) for name, block in blocks}


def test_the_command_from_a_log_to_the_page(tmp_path, capsys):
    pytest.importorskip("pyvis")
    file = write(tmp_path / "runs.jsonl", [*conversations(), {**LINE, "model": "m"}])
    options = ["--gamma", "0.5", "--estimator-kwargs", '{"edge_centric": false}']
    code, text, _ = outcome(capsys, "credit", file, *options)
    assert code == 0
    assert "3 episodes of 2 tasks (1 to 2 a task, median 2), 5 calls\n" in text
    assert "  1 task with one episode: no other to compare it with, no advantage for 1 call\n" in text
    assert "  fields that are not read: model (1)\n" in text
    assert "g2po without A_EC, gamma 0.5\n" in text
    # A_EP and A_NC of two values: ±1/sqrt(2) each.
    assert (
        '+1.41       1      2  mug            won           1  user: Find the mug.             go({"to": "kit' in text
    )
    assert "states: 50.0% of calls are in a state that another episode of the task visited" in text
    assert "States never recur after the first call" in text and "--state-key FILE.py:FUNCTION" in text
    folder = tmp_path / "runs-credit"
    lines = [json.loads(line) for line in (folder / "credit.jsonl").read_text().splitlines()]
    root = 2**-0.5
    np.testing.assert_allclose(
        [line.pop("advantage") for line in lines[:4]], [2 * root, root, -2 * root, -root], rtol=1e-5
    )
    key = lines[1]["state_key"]
    assert key.startswith('[{"content": "kitchen", "role": "tool"}, {"asked": ')
    assert lines[1] == {"task_id": "mug", "episode": "won", "call": 2, "value": 4.0, "visits": 1, "state_key": key}
    assert (lines[4]["episode"], lines[4]["advantage"]) == (3, None)
    written = list(read_jsonl(folder / "trajectories" / "train-000001.jsonl"))
    assert [t.group for t in written] == [0, 0, 1] and written[2].steps[0].advantage is None

    page = tmp_path / "page.html"
    assert outcome(capsys, "view", str(folder), "--output", str(page), "--no-open")[0] == 0
    shown = data_in(page)
    (group, alone), texts = shown["iteration-1"]["groups"], shown["iteration-1"]["texts"]
    steps = [step for trajectory in group["trajectories"] for step in trajectory["steps"]]
    assert [texts[step["o"]] for step in steps[1::2]] == ["tool: kitchen", "tool: cellar"]
    assert [step["a"] for step in steps[:2]] == ['go({"to": "kitchen"})', 'go({"to": "mug"})']
    assert [step["trained"] for step in steps] == [1.4142, 0.7071, -1.4142, -0.7071]
    assert group["adds_up"] and not alone["stored"]
    assert shown["overview"]["training"]["log"]["name"] == "runs.jsonl"
    assert shown["overview"]["sources"][0]["settings"]["file"] == file

    assert outcome(capsys, "credit", file, "--estimator", "grpo")[0] == 0, "its own folder is replaced"
    described = json.loads((folder / "run.json").read_text())
    assert described["traces"] == {"file": file, "state_key": None}
    assert described["estimator"]["estimator_name"] == "grpo"


def test_the_command_reads_an_array(tmp_path, capsys):
    file = tmp_path / "log.json"
    file.write_text(json.dumps(conversations(), indent=2), encoding="utf-8-sig")
    code, text, errors = outcome(capsys, "credit", str(file))
    assert code == 0 and "2 episodes of 1 task (2 a task), 4 calls" in text, errors
    file.write_text(json.dumps([{**LINE, "reward": "high"}], indent=2))
    assert "log.json, line 2: reward is 'high'; give a finite number" in outcome(capsys, "credit", str(file))[2]


def test_the_report_of_a_log_says_so_and_takes_its_gamma(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "runs.jsonl", conversations())
    assert outcome(capsys, "credit", file, "--gamma", "0.5")[0] == 0
    code, text, _ = outcome(capsys, "report", str(tmp_path / "runs-credit"), "--details")
    assert code == 0 and "Verdict       These runs were not trained on." in text
    assert not any(word in text for word in ("iteration ", "Nothing to", "value_lambda"))
    assert json.loads((tmp_path / "runs-credit" / "report" / "analysis.json").read_text())["gamma"] == 0.5


def test_actions_are_equal_if_their_calls_are(tmp_path):
    """Whatever was said beside the calls, and whatever their ids are."""
    said = [{**call("x", n), "content": f"I think {n}"} for n in (1, 2)]
    lines = [{"task_id": "t", "reward": n, "messages": [TASK, one]} for n, one in enumerate(said)]
    traces = trajectories_of_traces([*lines, {"task_id": "t", "reward": 0, "messages": [TASK, call("y")]}])
    one, two, other = (trajectory.steps[0] for trajectory in traces.trajectories)
    assert one.action != two.action and one.compared_action == two.compared_action != other.compared_action
    graph = StateGraph.from_groups(traces.groups, with_actions=True)
    assert graph.action[0] == graph.action[1] != graph.action[2]


def test_a_state_key_and_grpo_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys_of_rooms.py").write_text("def indoors(messages):\n    return messages[-1]['role']\n")
    file = write(tmp_path / "runs.jsonl", conversations())
    code, text, _ = outcome(capsys, "credit", file, "--state-key", "keys_of_rooms.py:indoors", "--output", "out")
    assert code == 0 and "after an episode's first call 100.0%" in text and "--state-key" not in text
    assert json.loads((tmp_path / "out" / "run.json").read_text())["traces"]["state_key"] == "keys_of_rooms.py:indoors"
    code, text, _ = outcome(capsys, "credit", file, "--estimator", "grpo", "--output", "out")
    assert code == 0 and "first call 0.0%" in text and "--state-key" not in text, "keys make no difference to it"


def test_similar_states_are_merged(tmp_path, capsys):
    pytest.importorskip("datasketch")
    results = ["the door is open and you see a mug on the table next to the window in room", "you are lost"]
    lines = [
        {"task_id": "t", "reward": n, "messages": [TASK, call("x"), {**seen(""), "content": f"{text} {n}"}, call("y")]}
        for text in results
        for n in (0, 1)
    ]
    text = outcome(capsys, "credit", write(tmp_path / "runs.jsonl", lines), "--state-key", "similar:0.85")[1]
    assert "75.0% of calls are in a state that another episode of the task visited" in text
    assert "after an episode's first call 50.0%" in text


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--estimator", "gae"], 2, "invalid choice: 'gae'"),
        (["--estimator-kwargs", '{"edges": 1}'], 1, "estimator_kwargs has 'edges'"),
        (["--gamma", "2"], 1, "gamma is 2"),
        (["--state-key", "similar:2"], 1, "state_key is 'similar:2': write similar:0.9"),
        (["--state-key", "json:__name__"], 1, "state_key is 'json:__name__': write file.py:function"),
        (["--state-key", "page"], 1, "state_key is 'page': write"),
        (["--state-key", "json:nothing"], 1, "'json:nothing' cannot be loaded"),
        (["--output", "run"], 1, "output is 'run', which holds another run: pass another --output"),
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
    assert code == 1 and f"{file}, line 2: reward is 'high'; give a finite number" in error
    assert "No such file" in outcome(capsys, "credit", str(tmp_path / "none.jsonl"))[2]
    assert "the log has no call of a model" in outcome(capsys, "credit", write(tmp_path / "empty.jsonl", []))[2]
    assert not (tmp_path / "runs-credit").exists() and not (tmp_path / "empty-credit").exists()
