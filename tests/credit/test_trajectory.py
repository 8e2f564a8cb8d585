"""Trajectories: plain data, JSON lines out and in."""

import json

import pytest

from g2po_trl import Step, Trajectory, read_jsonl, write_jsonl
from g2po_trl.credit.graph import record
from g2po_trl.runs.metrics import summarize
from g2po_trl.trajectory import is_whole, stored_row
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.masking import HIDDEN


def trajectory(task="put a clean mug on the desk – ✓", outcome="success") -> Trajectory:
    steps = [
        Step("You see a desk.\n", "go to desk 1", prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5]),
        Step(
            "Nothing happens.", "", valid=False, state_key="desk", admissible_actions=["look"], prompt_truncated=True
        ),
    ]
    return Trajectory(task, steps, 10.0, outcome, "You win.", info={"turns": 2})


@pytest.mark.parametrize("outcome", ["success", "failure", "truncated", "error", "lost"])
def test_success_is_one_of_five_outcomes_and_two_do_not_count(outcome):
    one = trajectory(outcome=outcome)
    assert one.success is (outcome == "success")
    assert one.counted is record(one).counted is (outcome not in ("error", "lost"))
    with pytest.raises(ValueError, match="outcome is 'won'"):
        trajectory(outcome="won")


def test_jsonl_gives_back_what_was_written(tmp_path):
    path = tmp_path / "trajectories" / "step_1.jsonl"
    written = [
        trajectory(),
        Trajectory("b", [], 0.0, "error", error="TimeoutError: 30 s"),
        Trajectory("c", [], 0.0, "failure", failure_reason="prompt too long: 900 tokens", task="Wash a cup."),
    ]
    write_jsonl(path, written)
    write_jsonl(path, [trajectory("c")], append=True)
    assert list(read_jsonl(path)) == [*written, trajectory("c")]
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 4 and "– ✓" in text, "readable"
    path.write_text(f"\n{text}\n", encoding="utf-8")
    assert list(read_jsonl(path))[0] == trajectory()
    write_jsonl(path, [])
    assert list(read_jsonl(path)) == []


def test_a_row_is_stored_without_secrets_and_in_a_bounded_size():
    secret, pad = "hf_" + "a" * 30, "x" * 480
    row = {"seed": 3, "api_key": "k3y", "prompt": f"use {secret}", "sizes": (1, 2.5), "when": {1: float("nan")}}
    stored = stored_row(row)
    assert stored == {"seed": 3, "api_key": HIDDEN, "prompt": f"use {HIDDEN}", "sizes": [1, 2.5], "when": {"1": None}}
    assert not is_whole(stored) and is_whole(stored_row({"seed": 3, "names": ["a"] * 9}))
    long = stored_row({"seed": 3, "parts": ["z" * 900], "story": f"{pad * 6} {secret} " + "y" * 10_000})
    assert list(long) == ["<cut>"] and not is_whole(long) and len(long["<cut>"]) == 4_000
    assert long["<cut>"].startswith('{"seed": 3, "parts": ["zzz') and "hf_" not in long["<cut>"]


@pytest.mark.parametrize("bad", ['{"task_id": "a"', '{"task_id": "a"}', '["a"]'])
def test_a_bad_line_is_named(tmp_path, bad):
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [trajectory()])
    path.write_text(path.read_text(encoding="utf-8") + bad + "\n", encoding="utf-8")
    with pytest.raises(G2POError, match=r"t\.jsonl, line 2"):
        list(read_jsonl(path))


def test_files_of_other_versions_are_read():
    data = json.loads(json.dumps(trajectory().to_dict()))
    data["colour"], data["steps"][1]["policy_version"] = "red", 3
    del data["task"], data["row"], data["steps"][0]["call"]
    assert Trajectory.from_dict(data) == trajectory()


@pytest.mark.parametrize(
    ("action", "listed", "expected"),
    [
        ("go north", ["go north", "wait"], True),
        (" Go North", ["go north"], True),
        ("go south", ["go north", "wait"], False),
        ("search[red shirt]", ["search[<your query>]", "click[back]"], True),
        ("search[]", ["search[<your query>]"], False),
        ("click[red shirt]", ["search[<your query>]"], False),
        ("a < b > c", ["a < b > c"], True),
        ("anything", [], None),
        ("anything", None, None),
    ],
)
def test_admissible_actions(action, listed, expected):
    assert Step("o", action, admissible_actions=listed).admissible is expected
    assert Step("o", action, valid=False, admissible_actions=listed).admissible is (None if not listed else False)


def test_the_error_of_success_is_over_tasks():
    """Four of eight won in each of six tasks, or all of three tasks and none of three: the same mean."""
    even = [Trajectory(str(n % 6), [], 0.0, "success" if n < 24 else "failure") for n in range(48)]
    apart = [Trajectory(str(n % 6), [], 0.0, "success" if n % 6 < 3 else "failure") for n in range(48)]
    low, high = (summarize(one)["success_rate_error"] for one in (even, apart))
    assert low == pytest.approx((0.25 / 50) ** 0.5), "at least that of independent episodes"
    assert high == pytest.approx((0.3 / 6) ** 0.5)
    assert "success_rate_error" not in summarize(even[:4])
