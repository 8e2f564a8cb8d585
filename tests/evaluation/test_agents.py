"""Prompted agents: what they ask and read; a server that stumbles; a real tiny model, killed and resumed."""

import json
import signal
import time
from pathlib import Path

import programs
import pytest
from chat_server import chat_completion, chat_server
from refusals import refused

from g2po_trl import Observation, TextEnvironment, read_jsonl
from g2po_trl.cli.commands.evaluate import main
from g2po_trl.evaluation.options import EvaluateOptions
from g2po_trl.evaluation.panel import Panel
from g2po_trl.evaluation.react import react_template
from g2po_trl.rollout.conversations import request_of
from g2po_trl.rollout.episode import Episode

HERE = Path(__file__).parents[1] / "helpers"


def prompted(**changes):
    """ReAct's prompts; `changes`: fields of its panel."""
    return react_template(Panel("p", [], TextEnvironment, **changes), lists_actions=True)


def test_a_conversation_of_thoughts_and_actions():
    said, listed = "Thought: a\nAction: go east", "\nActions you can take now:\n"
    episode = Episode("t", observation=Observation("Hall.", None, ["go east", "look"]), task="Find the key.")
    episode.steps.append(episode.step("go east", said))
    episode.observation = Observation("Room 0.", None, ["go west"])
    system, *asked = request_of(episode, prompted(about="{a house}")).messages
    assert "{a house}" in system["content"] and system["role"] == "system"
    assert asked == [
        {"role": "user", "content": f"Your task: Find the key.\n\nObservation: Hall.{listed}go east\nlook"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": f"Observation: Room 0.{listed}go west"},
    ]


@pytest.mark.parametrize(
    ("completion", "action", "valid"),
    [
        ("Thought: so\nAction: Go to Desk 1", "Go to Desk 1", True),
        ("Thought: so\nAction: go EAST", "Go East", True),
        ("<think>\nAction: go east\n</think>\nAction: look", "look", True),
        ("Thought: so\nACTION : look\nObservation: x", "look", True),
        ("I will look\nObservation:", "I will look", False),
        ("Action:\nObservation:", "", False),
        ("Thought: a\nAction: ```python\nA = 1\nprint(A)\n```\nmore", "A = 1\nprint(A)", True),
    ],
)
def test_actions_are_read(completion, action, valid):
    assert prompted().read(completion, "", ["Go East", "Look around"]) == (action, valid)
    assert prompted(lower_case=True).read(completion, "", ["look"]) == (action.lower(), valid)


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("environment", None, {}),
        ("environment", "alfworld", {"agent": "agent.py"}),
        ("seeds", 0, {}),
        ("stop_sequences", [""], {}),
        ("generation_kwargs", {"max_new_tokens": 2}, {}),
        ("panel", "foo", {"environment": "a:B"}),
        ("tasks", "t", {}),
        ("prompt", "a:B", {"agent": "react"}),
        ("history", "window", {"agent": "react"}),
        ("engine_options", {"dtype": "auto"}, {"base_url": "http://x"}),
        ("max_prompt_length", 900, {"base_url": "http://x"}),
        ("parallel", 2, {}),
    ],
)
def test_options_that_do_not_fit_are_refused(field, value, others):
    with refused(field):
        EvaluateOptions(**{"model": "m", "environment": "alfworld", **others, field: value})


KEY_DOOR = ["--environment", f"{HERE / 'toy_environments.py'}:KeyDoorEnvironment", "--max-completion-length", "8"]


@pytest.fixture
def stumbling():
    """A server that refuses the first requests, then says "Action: take key" or the like."""
    pytest.importorskip("openai")
    refusals = [429, 500, 503]

    def answer(body, headers):
        if refusals:
            server.answer_headers = {"Retry-After": "0"}
            server.asked.pop()
            return refusals.pop(), {}
        if len(server.asked) > server.last:
            server.asked.pop()
            return 400, {"error": {"message": "no credit is left"}}
        server.keys.add(headers["Authorization"])
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        action = ["go kitchen", "go garden", "take key", "go kitchen", "go hall", "open door"][turn % 6]
        return 200, chat_completion(f"Thought: so\nAction: {action}")

    with chat_server(answer) as server:
        server.keys, server.last = set(), 99
        yield server


def test_a_server_that_stumbles_and_going_on(stumbling, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-123")
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "out"
    tasks.write_text('{"key_room": "garden"}\n' * 3)
    flags = [*KEY_DOOR, "--tasks", str(tasks), "--agent", "react", "--model", "m", "--base-url", stumbling.url]
    flags += ["--key-variable", "MY_KEY", "--output", str(output), "--batch-size", "1", "--seeds", "1"]
    stumbling.last = 10
    with refused("base_url"):  # of 18 that are needed: six steps an episode
        main(flags)
    path = output / "trajectories" / "react-0.jsonl"
    assert len(list(read_jsonl(path))) == 1 and len(stumbling.asked) == 10
    body = stumbling.asked[0]
    assert stumbling.keys == {"Bearer secret-123"} and "secret-123" not in (output / "settings.json").read_text()
    assert (body["model"], body["temperature"], body["stop"]) == ("m", 0.4, ["\nObservation:"])

    stumbling.last = 99
    main(flags)
    assert len(stumbling.asked) == 10 + 12, "the finished episode was not played again"
    played = list(read_jsonl(path))
    assert [t.info["panel_index"] for t in played] == [0, 1, 2] and all(t.success for t in played)
    assert played[0].info["prompt_tokens"] == 42 and played[0].info["completion_tokens"] == 18
    seeds = [body["seed"] for body in stumbling.asked]
    assert len(set(seeds[:6])) == 6 and seeds[6:10] == seeds[10:14], "the same question has the same seed"


def test_killed_and_resumed_gives_the_same_numbers(tmp_path):
    """By a real tiny model, and with another number of workers."""
    pytest.importorskip("alfworld")
    from g2po_envs.alfworld import generate_games
    from g2po_envs.alfworld.tiny import tiny_model_path

    generate_games(tmp_path / "games", "held-out", 3, seed=11, size="tiny", num_workers=1, progress=False)
    shared = ["--environment", "alfworld", "--panel", str(tmp_path / "games"), "--panel-options", '{"compact": true}']
    shared += ["--model", str(tiny_model_path()), "--max-completion-length", "24", "--max-turns", "10"]
    shared += ["--batch-size", "2", "--seeds", "2", "--temperature", "1.0"]

    def flags(output, workers):
        return [*shared, "--output", str(tmp_path / output), "--num-environment-workers", str(workers)]

    main(flags("whole", 1))
    process = programs.start("-m", "g2po_trl", "evaluate", *flags("killed", 1), stdout=tmp_path / "log")
    path = tmp_path / "killed" / "trajectories" / "direct-0.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "results.json").exists()
    with path.open("a") as file:
        file.write('{"task_id": "half a li')
    main(flags("killed", 2))

    whole, killed = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed"))
    assert whole["seeds"] == killed["seeds"] and whole["seeds"][0] != whole["seeds"][1]
    assert whole["seeds"][0]["errors"] == 0 and whole["seeds"][0]["valid"] > 90, "it was taught this form"
    for seed in (0, 1):
        texts = [(tmp_path / n / "trajectories" / f"direct-{seed}.jsonl").read_text() for n in ("whole", "killed")]
        assert texts[0] == texts[1]
