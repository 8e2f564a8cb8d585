"""One episode goes wrong, the others go on: as in an undisturbed run, whatever happened to their worker."""

import os
import signal
import sys
import time

import pytest
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment, Snapshots

from g2po_trl import EnvironmentPool, Observation, StepResult, TextEnvironment

WALK = KEY_DOOR_WALKTHROUGHS["garden"]


class Mortal(KeyDoorEnvironment):
    """Suffers what the action says; hangs in reset once, if there is a file that it then removes."""

    def reset(self, sign="", **task):
        if sign and os.path.exists(sign):
            os.remove(sign)
            self.suffer("hang")
        return super().reset(**task)

    def step(self, action):
        self.suffer(action)
        return super().step(action)

    def suffer(self, what):
        if what == "hang":
            time.sleep(60)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "exit":
            os._exit(3)


def walk(pool, tasks, faults, groups=None):
    """Everybody walks to the garden and back, but for `{(slot, turn): action}`. All that was answered, by slot."""
    seen = [[first] for first in pool.reset(tasks, groups)]
    for turn, action in enumerate(WALK):
        live = [slot for slot in range(len(tasks)) if is_live(seen[slot][-1])]
        for slot, result in pool.step({slot: faults.get((slot, turn), action) for slot in live}).items():
            seen[slot].append(result)
    return seen


def is_live(answer):
    return not hasattr(answer, "kind") and not getattr(answer, "terminated", False)


@pytest.mark.parametrize(("fault", "kind"), [("hang", "timeout"), ("kill", "crash"), ("exit", "crash")])
def test_one_of_eight_goes_wrong_and_seven_are_played_to_their_ends(fault, kind):
    with EnvironmentPool(Mortal, num_workers=1, step_timeout=4) as pool:
        undisturbed = walk(pool, [{}] * 8, {})
        assert all(answers[-1].terminated for answers in undisturbed)
        before = pool.worker_pids
        seen = walk(pool, [{}] * 8, {(3, 2): fault})
        assert [seen[slot] == undisturbed[slot] for slot in range(8)] == [slot != 3 for slot in range(8)]
        assert seen[3][:3] == undisturbed[3][:3] and seen[3][3].kind == kind and "slot 3" in seen[3][3].message
        assert pool.replayed == 7 and pool.worker_pids != before


def test_a_worker_that_is_killed_while_idle_costs_no_episode():
    with EnvironmentPool(Mortal, num_workers=2) as pool:
        undisturbed = walk(pool, [{}] * 4, {})
        first = pool.reset([{}] * 4)
        for turn, action in enumerate(WALK):
            os.kill(pool.worker_pids[turn % 2], signal.SIGKILL)
            results = pool.step(dict.fromkeys(range(4), action))
            assert [results[slot] for slot in range(4)] == [undisturbed[slot][turn + 1] for slot in range(4)]
        assert first == [answers[0] for answers in undisturbed]


def test_a_reset_that_hangs_costs_one_episode(tmp_path):
    (tmp_path / "sign").touch()
    with EnvironmentPool(Mortal, num_workers=1, reset_timeout=3) as pool:
        seen = walk(pool, [{"sign": str(tmp_path / "sign")}] * 8, {})
    assert [slot for slot in range(8) if not is_live(seen[slot][0])] == [0] and seen[0][0].kind == "timeout"
    assert all(answers[-1].terminated for answers in seen[1:])


class Endless(TextEnvironment):
    def reset(self, hangs=False):
        time.sleep(60 * hangs)
        return "x"

    def step(self, action):
        time.sleep(60 * (action == "hang"))
        return StepResult("y")


def test_a_group_whose_reset_hangs_costs_two_limits():
    with EnvironmentPool(Endless, num_workers=1, reset_timeout=3) as pool:
        pool.reset([{}])  # started
        results = pool.reset([{"hangs": True}] * 8 + [{}] * 2, groups=[0] * 8 + [1] * 2)
        assert [getattr(result, "kind", "") for result in results] == ["timeout"] * 8 + [""] * 2
        assert ["not tried" in result.message for result in results[:8]] == [False] * 2 + [True] * 6


def test_when_all_steps_hang_three_limits_pass():
    with EnvironmentPool(Endless, num_workers=1, step_timeout=2) as pool:
        pool.reset([{}] * 8)
        results = pool.step(dict.fromkeys(range(8), "hang"))
        assert {result.kind for result in results.values()} == {"timeout"}
        assert ["given up" in results[slot].message for slot in range(8)] == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        (
            "time.sleep(60)",
            "timeout",
            "took more than 3 s; its worker was killed; if its imports are only slow, raise",
        ),
        ("os._exit(4)", "crash", "exit status 4) when it was loaded"),
    ],
)
def test_what_happens_at_import_is_said_and_nothing_waits_for_ever(tmp_path, monkeypatch, statement, kind, message):
    """Also when a task is larger than what a pipe holds."""
    (tmp_path / "late_import.py").write_text(
        f"import os, time\nfrom g2po_trl import TextEnvironment\nif {os.getpid()} != os.getpid(): {statement}\n"
        "class Late(TextEnvironment): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_import", raising=False)
    from late_import import Late

    with EnvironmentPool(Late, num_workers=1, load_timeout=3) as pool:
        results = pool.reset([{"text": "x" * 3_000_000}] * 4)
        assert {result.kind for result in results} == {kind} and message in results[3].message


def test_a_restored_episode_whose_worker_is_killed_is_restored_again():
    with EnvironmentPool(Snapshots, num_workers=1, saves_states=True) as pool:
        (first,) = pool.reset([{"turns": 9}])
        assert first.saved == "9 0"
        assert (
            first
            == Observation("left 9", "k9", ["go"], "TASK")
            == first
            != Observation("left 9", "k8", ["go"], "TASK")
        )
        saved = [pool.step({0: "go"})[0].observation.saved for _ in range(3)][-1]
        pool.end()
        pool.reset([{"turns": 9}])
        assert pool.restore({0: saved})[0].text == "every third"
        assert pool.step({0: "go"})[0].observation.text == "left 5"
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        results = [pool.step({0: "go"})[0] for _ in range(5)]
    assert [result.observation.text for result in results] == [
        "left 4",
        "every third",
        "left 2",
        "left 1",
        "every third",
    ]
    assert results[-1].terminated and type(results[-1].observation) is Observation, "nobody returns to the end"
    assert pool.replayed == 1


class Hoarder(KeyDoorEnvironment):
    """Saves what the task says."""

    def reset(self, saves):
        self.saves = saves
        return super().reset()

    def save(self):
        return {"number": lambda: 7, "large": lambda: b"x" * 1_000_001, "error": lambda: 1 / 0}[self.saves]()

    def restore(self, state):
        return self._observe("You are back.")


def test_what_cannot_be_saved_or_restored_is_named():
    with EnvironmentPool(Hoarder, num_workers=1, saves_states=True) as pool:
        number, large, error = (
            answer.message for answer in pool.reset([{"saves": s} for s in ("number", "large", "error")])
        )
    assert number.startswith("Hoarder.save returned 7; return bytes or a text")
    assert large.startswith(
        "Hoarder.save returned 1,000,001 bytes or characters, more than 1,000,000; keep the state in"
    )
    assert "ZeroDivisionError" in error and error.startswith("Hoarder.reset raised")
    with EnvironmentPool(KeyDoorEnvironment, num_workers=1, saves_states=True) as pool:
        assert type(pool.reset([{}])[0]) is Observation
        failure = pool.restore({0: "x"})[0]
        assert failure.kind == "invalid" and "KeyDoorEnvironment has no save and restore" in failure.message
    with EnvironmentPool(Hoarder, num_workers=1) as pool:
        assert type(pool.reset([{"saves": "error"}])[0]) is Observation, "nothing is saved unless it is asked for"
