"""One episode goes wrong, the others go on: as in an undisturbed run, whatever happened to their worker."""

import os
import signal
import sys
import time

import pytest
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment

from g2po_trl import EnvironmentPool, PoolLimits, TextEnvironment

WALK = KEY_DOOR_WALKTHROUGHS["garden"]


class Mortal(KeyDoorEnvironment):
    """Suffers what the action says."""

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


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


@pytest.mark.parametrize(("fault", "kind"), [("hang", "timeout"), ("kill", "crash")])
def test_one_of_eight_goes_wrong_and_seven_are_played_to_their_ends(fault, kind):
    with EnvironmentPool(Mortal, PoolLimits(1, environment_step_timeout=4)) as pool:
        undisturbed = walk(pool, [{}] * 8, {})
        assert all(answers[-1].terminated for answers in undisturbed)
        before = pool.worker_pids
        seen = walk(pool, [{}] * 8, {(3, 2): fault})
        assert [seen[slot] == undisturbed[slot] for slot in range(8)] == [slot != 3 for slot in range(8)]
        assert seen[3][:3] == undisturbed[3][:3] and seen[3][3].kind == kind and "slot 3" in seen[3][3].message
        assert pool.replayed == 7 and pool.worker_pids != before


def test_a_worker_that_is_killed_while_idle_costs_no_episode():
    with EnvironmentPool(Mortal, PoolLimits(2)) as pool:
        undisturbed = walk(pool, [{}] * 4, {})
        first = pool.reset([{}] * 4)
        for turn, action in enumerate(WALK):
            os.kill(pool.worker_pids[turn % 2], signal.SIGKILL)
            results = pool.step(dict.fromkeys(range(4), action))
            assert [results[slot] for slot in range(4)] == [undisturbed[slot][turn + 1] for slot in range(4)]
        assert first == [answers[0] for answers in undisturbed]


class Endless(TextEnvironment):
    def reset(self):
        return "x"

    def step(self, action):
        time.sleep(60)


def test_when_all_steps_hang_three_limits_pass():
    with EnvironmentPool(Endless, PoolLimits(1, environment_step_timeout=2)) as pool:
        pool.reset([{}] * 8)
        results = pool.step(dict.fromkeys(range(8), "go"))
        assert {result.kind for result in results.values()} == {"timeout"}
        assert ["given up" in results[slot].message for slot in range(8)] == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("time.sleep(60)", "timeout", "took more than 3 s; its worker was killed"),
        ("os._exit(4)", "crash", "exit status 4) while it was loading"),
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

    with EnvironmentPool(Late, PoolLimits(1, environment_load_timeout=3)) as pool:
        results = pool.reset([{"text": "x" * 3_000_000}] * 4)
        assert {result.kind for result in results} == {kind} and message in results[3].message
