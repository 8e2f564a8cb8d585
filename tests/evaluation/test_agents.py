"""Prompted agents: what they ask and read; real servers, a scripted model, a real tiny one; killed and resumed."""

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


def an_episode(completions=()):
    episode = Episode("t", observation=Observation("Hall.", None, ["go east", "look"]), task="Find the key.")
    for number, completion in enumerate(completions):
        episode.steps.append(episode.step("go east", completion))
        episode.observation = Observation(f"Room {number}.", None, ["go west"])
    return episode


def prompted(**changes):
    """ReAct's prompts; `changes`: fields of its panel."""
    return react_template(Panel("p", [], TextEnvironment, **changes), lists_actions=True)


def test_a_conversation_of_thoughts_and_actions():
    said = ["Thought: a\nAction: go east", "Thought: b\nAction: go east"]
    system, *asked = request_of(an_episode(said), prompted(about="{a house}")).messages
    assert "{a house}" in system["content"] and system["role"] == "system"
    listed = "\nActions you can take now:\n"
    assert asked == [
        {"role": "user", "content": f"Your task: Find the key.\n\nObservation: Hall.{listed}go east\nlook"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": f"Observation: Room 0.{listed}go west"},
        {"role": "assistant", "content": said[1]},
        {"role": "user", "content": f"Observation: Room 1.{listed}go west"},
    ]


@pytest.mark.parametrize(
    ("completion", "action", "valid"),
    [
        ("Thought: so\nAction: Go to Desk 1", "Go to Desk 1", True),
        ("Thought: so\nAction: go EAST", "Go East", True),
        ("<think>\nAction: go east\n</think>\nAction: look", "look", True),
        ("Thought: so\nACTION : look\nObservation: x", "look", True),
        ("Action: look\nAction: go", "look", True),
        ("I will look\nObservation:", "I will look", False),
        ("", "", False),
        ("Action:\nObservation:", "", False),
        ("Thought: a\nAction: ```python\nA = 1\nprint(A)\n```\nmore", "A = 1\nprint(A)", True),
    ],
)
def test_actions_are_read(completion, action, valid):
    listed = ["Go East", "Look around"]
    assert prompted().read(completion, "", listed) == (action, valid)
    assert prompted(lower_case=True).read(completion, "", ["look"]) == (action.lower(), valid)


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("environment", None, {}),
        ("environment", "chess", {}),
        ("environment", "alfworld", {"agent": "agent.py"}),
        ("seeds", 0, {}),
        ("stop_sequences", [""], {}),
        ("generation_kwargs", {"max_new_tokens": 2}, {}),
        ("agent", "reac", {}),
        ("panel", "foo", {"environment": "a:B"}),
        ("tasks", Path("t"), {}),
        ("prompt", "a:B", {"agent": "react"}),
        ("history", "window", {"agent": "react"}),
        ("history_length", 3, {"agent": "react"}),
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
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"key_room": "garden"}\n' * 3)
    flags = [*KEY_DOOR, "--tasks", str(tasks), "--agent", "react", "--model", "m", "--base-url", stumbling.url]
    flags += ["--key-variable", "MY_KEY", "--output", str(tmp_path / "out"), "--batch-size", "1", "--seeds", "1"]
    stumbling.last = 10
    with refused("base_url"):  # of 18 that are needed: six steps an episode
        main(flags)
    path = tmp_path / "out" / "trajectories" / "react-0.jsonl"
    assert len(list(read_jsonl(path))) == 1 and len(stumbling.asked) == 10
    body = stumbling.asked[0]
    assert stumbling.keys == {"Bearer secret-123"}
    assert (body["model"], body["temperature"], body["stop"]) == ("m", 0.4, ["\nObservation:"])
    assert "secret-123" not in (tmp_path / "out" / "settings.json").read_text()

    stumbling.last = 99
    main(flags)
    assert len(stumbling.asked) == 10 + 12, "the finished episode was not played again"
    played = list(read_jsonl(path))
    assert [t.info["panel_index"] for t in played] == [0, 1, 2] and all(t.success for t in played)
    assert played[0].info["prompt_tokens"] == 42 and played[0].info["completion_tokens"] == 18
    seeds = [body["seed"] for body in stumbling.asked]
    assert len(set(seeds[:6])) == 6 and seeds[6:10] == seeds[10:14], "the same question has the same seed"
    with refused("output") as other:
        main([*flags, "--temperature", "0.5"])
    assert other.value.value == {"temperature": (0.4, 0.5)}


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    pytest.importorskip("alfworld")
    from g2po_envs.alfworld import generate_games

    folder = tmp_path_factory.mktemp("games")
    return folder, generate_games(folder, "held-out", 6, seed=11, size="tiny", num_workers=1, progress=False)


def flags_for(games, output, *more):
    panel = "--panel", str(games[0]), "--panel-options", '{"compact": true}', "--num-environment-workers", "1"
    return ["--environment", "alfworld", *panel, "--output", str(output), *more]


@pytest.mark.parametrize("agent", ["direct", "react"])
def test_a_real_tiny_model_plays(games, tmp_path, agent):
    from g2po_envs.alfworld.tiny import tiny_model_path

    flags = f"--model {tiny_model_path()} --agent {agent} --max-completion-length 24 --limit 2".split()
    main(flags_for(games, tmp_path / "out", *flags))
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["seeds"]
    assert 0 <= row["All"] <= 100 and row["errors"] == 0 and row["tokens"] > 0
    assert (row["valid"] == 100) == (agent == "direct"), "it was taught the direct form alone"


def test_killed_and_resumed_gives_the_same_numbers(games, tmp_path):
    """With other numbers of workers, too."""
    from g2po_envs.alfworld.tiny import tiny_model_path

    flags = ["--model", str(tiny_model_path()), "--max-completion-length", "24", "--batch-size", "2", "--seeds", "2"]
    flags += ["--temperature", "1.0"]
    command = ("-m", "g2po_trl", "evaluate")
    programs.run(*command, *flags_for(games, tmp_path / "whole", *flags)).check_returncode()

    process = programs.start(*command, *flags_for(games, tmp_path / "killed", *flags), stdout=tmp_path / "log")
    path = tmp_path / "killed" / "trajectories" / "direct-0.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "results.json").exists()
    with path.open("a") as file:
        file.write('{"task_id": "half a li')
    flags += ["--num-environment-workers", "8"]
    programs.run(*command, *flags_for(games, tmp_path / "killed", *flags)).check_returncode()

    whole, killed = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed"))
    assert whole["seeds"] == killed["seeds"] and whole["seeds"][0] != whole["seeds"][1]
    for seed in (0, 1):
        texts = [(tmp_path / n / "trajectories" / f"direct-{seed}.jsonl").read_text() for n in ("whole", "killed")]
        assert texts[0] == texts[1]
