"""`python -m pytest`: the agent works with scripted answers in place of a model."""

import random
import shutil
from pathlib import Path

from agent import HERE, PASSED, Desk, expert, repair

from g2po_trl import AgentEnvironment
from g2po_trl.agents.workspace import Workspace
from g2po_trl.environments.tasks import read_tasks
from g2po_trl.prompts.conversation import ChatResponse

TASKS = read_tasks(Path(__file__).with_name("tasks.jsonl"))


def play(task, answer, turns=40):
    """Return the keys of an episode's states, and its last step's result; `answer` returns calls for messages."""
    environment, keys, result = AgentEnvironment(repair, max_turns=turns), [], None
    seen = environment.reset(**task)
    try:
        while result is None or not (result.terminated or result.truncated):
            keys.append(seen.state_key)
            calls = [{"type": "function", "function": call} for call in answer(seen.request.messages)]
            result = environment.step(ChatResponse("", tuple(calls)).to_action())
            seen = result.observation
    finally:
        environment.close()
    return keys, result


def calls(*pairs):
    """Return answers that make one call each: a name and its arguments."""
    answers = iter([[{"name": name, "arguments": arguments}] for name, arguments in pairs])
    return lambda messages: next(answers, [])


def desk(folder, name="kitchen-1"):
    return Desk(Workspace(HERE / "repositories" / name, folder / "workspace"))


def test_the_tests_of_each_repository_fail(tmp_path):
    for number, task in enumerate(TASKS):
        (tmp_path / str(number)).mkdir()
        said = desk(tmp_path / str(number), task["repository"]).results[0]
        assert " fail: " in said, (task, said)


def test_the_expert_corrects_most():
    rng = random.Random(0)
    ends = [play(task, lambda messages: [expert(messages, None, rng)], turns=60)[1] for task in TASKS[::17]]
    assert sum(end.reward for end in ends) >= len(ends) // 2
    assert all("\n+" in end.info["diff"] for end in ends if end.reward)


def test_failed_guesses_in_any_order_lead_to_the_same_state():
    def tried(*guesses):
        edits = (("edit", {"line": 10, "old": "1", "new": new}) for new in guesses)
        undone = [call for edit in edits for call in (edit, ("test", {}), ("undo", {}))]
        return play({"repository": "parking-5"}, calls(("read", {"file": "task.py"}), *undone), turns=8)

    (keys, end), (others, _) = tried("2", "3"), tried("3", "2")
    assert keys[:2] == others[:2] and keys[7] == others[7] and len({*keys, *others}) == 13
    assert end.terminated and end.reward == 0


def test_what_is_shown(tmp_path):
    one = desk(tmp_path, "kitchen-3")
    one.read("task.py")
    one.edit(10, ">", "<")
    one.undo()
    one.edit(10, "minutes", "2")
    before, after = one.look().splitlines(), (one.test(), one.look().splitlines())[1]
    assert after[-3:] == ["undone: line 10: > is now <", "line 10: minutes is now 2", after[-1]]
    assert before[-1] == "not tested" and after[-1] == "1 of 4 tests fail: assert is_done(9, 8)"
    assert [line for line in after if ">" in line.split(" ")[1]] == [" 10>     return 2 - needed > 0"]


def test_wrong_calls_change_nothing(tmp_path):
    one = desk(tmp_path)
    one.read("task.py")
    before = one.workspace.state()
    for name, arguments in (
        ("delete", "{}"),
        ("edit", "[]"),
        ("edit", '{"line": 99, "old": "a", "new": "b"}'),
        ("edit", '{"line": 1, "old": "nothing", "new": "b"}'),
        ("read", '{"file": "../../agent.py"}'),
        ("undo", "{}"),
    ):
        one.use(name, arguments)
        assert one.note and one.workspace.state() == before, (name, arguments)


def test_tests_that_were_changed_are_put_back(tmp_path):
    one = desk(tmp_path)
    (one.workspace.folder / "test_task.py").write_text("def test_nothing(): pass\n")
    assert one.run_tests() != PASSED


def test_what_runs_for_ever_is_ended(tmp_path):
    shutil.copytree(HERE / "repositories" / "ledger-1", tmp_path / "source")
    (tmp_path / "source" / "task.py").write_text("def total(amounts):\n    while True:\n        pass\n")
    (tmp_path / "source" / "test_task.py").write_text("from task import total\n\n\ndef test_total():\n    total([])\n")
    assert "TimeoutError" in Desk(Workspace(tmp_path / "source", tmp_path / "workspace")).results[0]
