"""Answers come when they are ready, whatever other episodes and workers do, and as in an undisturbed run."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from refusals import refused
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment

held = []


class Obedient(TextEnvironment):
    """Does what the action says; when its steps are done, the episode is over."""

    def reset(self, name="", length=1000, seconds=0.0, fault="", log=os.devnull):
        self.name, self.left = name, length
        self.suffer(fault)
        with open(log, "a") as file:
            file.write(".")
        time.sleep(seconds)
        return Observation(f"{name} begins", state_key=str(os.getpid()))

    def step(self, action):
        self.left -= 1
        self.suffer(action)
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action.startswith("big"):
            Path(action.removeprefix("big ")).touch()
        info = {"much": "x" * 5_000_000} if action.startswith("big") else {}
        return StepResult(Observation(f"{self.name} {action}"), 1.0, terminated=self.left == 0, info=info)

    def suffer(self, what):
        if what == "exit":
            os._exit(3)
        if what == "grow":
            held.append(os.urandom(1) * 150_000_000)


class Nameless(Obedient):
    """Names no process, so that its episodes can be played again in another."""

    def reset(self, **task):
        super().reset(**task)
        return Observation(f"{self.name} begins")


@pytest.fixture(scope="module")
def shared():
    with EnvironmentPool(Obedient, PoolLimits(2, 2, 2, environment_load_timeout=60)) as pool:
        yield pool


@pytest.fixture
def pool(shared):
    shared.end()
    yield shared


def received(pool, slots):
    """Waits for the answers of these slots, and no others."""
    answers = {}
    while set(answers) != set(slots):
        new = pool.receive(timeout=20)
        assert new and not set(new) & set(answers), "nothing comes twice"
        answers |= new
    return answers


def texts(answers):
    return {slot: getattr(a, "observation", a).text for slot, a in answers.items()}


def test_a_slow_environment_holds_up_no_fast_one_in_another_worker(pool):
    assert pool.begin([{"name": "a"}, {"name": "b"}]) == [0, 1]
    assert texts(received(pool, [0, 1])) == {0: "a begins", 1: "b begins"}
    assert pool.receive(timeout=None) == {}, "nothing is owed"
    pool.send({0: "sleep 1.2", 1: "go"})
    for _ in range(5):
        assert texts(pool.receive(timeout=None)) == {1: "b go"}
        pool.send({1: "go"})
    assert texts(received(pool, [0, 1])) == {0: "a sleep 1.2", 1: "b go"}


def test_episodes_are_opened_and_ended_while_others_play(pool):
    pool.begin([{"name": name} for name in "abc"])
    received(pool, range(3))
    pool.send({0: "sleep 0.3", 1: "go", 2: "go"})
    pool.end([2])
    assert pool.begin([{"name": "d"}, {"name": "e", "length": 1}]) == [2, 3], "the first free slots"
    assert texts(received(pool, range(4))) == {0: "a sleep 0.3", 1: "b go", 2: "d begins", 3: "e begins"}
    pool.send({3: "go"})
    pool.step(dict.fromkeys(range(3), "go"))  # then that of slot 3 has come, too
    assert pool.begin([{"name": "f"}]) == [4], "slot 3 is not free before its last answer was taken"
    last = received(pool, [3, 4])
    assert last[3].terminated and pool.begin([{"name": "g"}]) == [3]
    with refused("slot 3"):
        pool.send({0: "go", 3: "go"})
    with refused("slot 9"):
        pool.step({0: "go", 9: "go"})
    assert texts(received(pool, [3])) == {3: "g begins"}
    pool.send({1: "go"})
    assert texts(pool.step({0: "go"})) == {0: "a go"}
    assert texts(received(pool, [1])) == {1: "b go"}, "not lost by step"
    pool.send({1: "go"})
    assert [o.text for o in pool.reset([{"name": "h"}])] == ["h begins"]
    assert pool.receive(timeout=0.3) == {}, "reset ends all others"


def test_what_is_owed_by_ended_episodes_is_not_waited_for(pool, tmp_path):
    """Their jobs are not done, apart from those that have begun."""
    pool.begin([{"name": "old", "seconds": 0.05, "log": str(tmp_path / "log")}] * 200)
    pool.receive(timeout=None)
    assert [o.text for o in pool.reset([{"name": "new"}] * 2)] == ["new begins"] * 2
    assert len((tmp_path / "log").read_text()) < 200


def test_the_same_answers_whatever_the_workers_and_as_of_reset_and_step():
    """All episodes to their ends, which come at different turns."""
    rooms = ["garden", "hall", "cellar", "hall", "garden"]
    walks = [KEY_DOOR_WALKTHROUGHS[room] for room in rooms]
    tasks, played = [{"key_room": room} for room in rooms], []
    for workers in (1, 3):
        with EnvironmentPool(KeyDoorEnvironment, PoolLimits(workers)) as pool:
            synchronous = [[first] for first in pool.reset(tasks, groups=[4, 4, 1, 0, 1])]
            for turn in range(max(map(len, walks))):
                for slot, result in pool.step({s: w[turn] for s, w in enumerate(walks) if turn < len(w)}).items():
                    synchronous[slot].append(result)
            pool.begin(tasks, ["x", "x", "y", "z", "z"])
            streamed = [[] for _ in rooms]
            while answers := pool.receive(timeout=None):
                for slot, answer in answers.items():
                    streamed[slot].append(answer)
                pool.send({s: walks[s][len(streamed[s]) - 1] for s in answers if len(streamed[s]) <= len(walks[s])})
            played += [synchronous, streamed]
    assert all(one == played[0] for one in played)
    assert [[answers[-1].terminated, answers[-1].reward] for answers in played[0]] == [[True, 10.0]] * 5


def test_tasks_that_cannot_be_reset_are_not_tried_for_ever(pool):
    pool.begin([{"fault": "exit"}] * 6 + [{"name": "a"}], groups=["bad"] * 6 + ["good"])
    answers = received(pool, range(7))
    assert [getattr(answers[slot], "kind", "") for slot in range(7)] == ["crash"] * 6 + [""]
    assert sum("not tried" in answers[slot].message for slot in range(6)) >= 3
    (slot,) = pool.begin([{"fault": "exit"}], groups=["bad"])
    assert "not tried" in pool.receive()[slot].message, "a member that comes later is not tried either"
    (slot,) = pool.begin([{"fault": "exit"}], groups=["bad, played again"])
    assert "not tried" not in received(pool, [slot])[slot].message


def test_a_caller_that_comes_late_finds_answers_and_no_time_limit(pool, tmp_path):
    """Time limits are of environments: not of answers that nobody takes, not even of half an answer."""
    pool.begin([{"name": "a"}] * 2)
    received(pool, range(2))
    before, begun = pool.worker_pids, tmp_path / "begun"
    pool.send({0: f"big {begun}", 1: "sleep 1.0"})  # big: more than one call reads
    while not begun.exists():
        time.sleep(0.01)
    answers = pool.receive()  # that the worker has taken up its job
    time.sleep(2.1)
    answers |= received(pool, {0, 1} - set(answers))
    assert len(answers[0].info["much"]) == 5_000_000
    assert texts(answers)[1] == "a sleep 1.0" and pool.worker_pids == before


def test_an_old_worker_plays_its_episodes_to_their_ends_beside_its_successor():
    with EnvironmentPool(Obedient, PoolLimits(1, environment_worker_resets=3)) as pool:
        pool.begin([{"name": name, "length": 3} for name in "abc"])
        (old,) = {answer.state_key for answer in received(pool, range(3)).values()}
        pool.send({0: "go"})
        pool.begin([{"name": "d"}])
        answers = received(pool, [0, 3])
        assert answers[3].state_key != old and pool.recycled == 1 and len(pool.worker_pids) == 2
        for _ in range(2):  # in another process their replay would not find this one in the first observation
            assert all(isinstance(answer, StepResult) for answer in pool.step(dict.fromkeys(range(3), "go")).values())
        pool.end([1, 2])
        assert int(old) not in pool.worker_pids and len(pool.worker_pids) == 1 and pool.replayed == 0


def test_the_episodes_of_a_worker_that_has_grown_move():
    with EnvironmentPool(Nameless, PoolLimits(1, environment_worker_memory_mb=143)) as pool:
        pool.begin([{"name": name} for name in "abc"])
        received(pool, range(3))
        (old,) = pool.worker_pids
        pool.step({0: "go"})
        pool.step({1: "grow"})
        pool.send({1: "sleep 0.5"})
        pool.begin([{"name": name} for name in "def"])  # looks at the memory
        pool.send({0: "again", 2: "go"})
        answers = texts(received(pool, range(6)))
        assert [answers[slot] for slot in range(3)] == ["a again", "b sleep 0.5", "c go"]
        assert [answers[slot] for slot in range(3, 6)] == ["d begins", "e begins", "f begins"]
        assert pool.recycled == 1 and old not in pool.worker_pids and pool.replayed == 2
        pool.end([1])  # playing it again would grow the next one, too
        assert texts(pool.step({0: "go", 5: "go"})) == {0: "a go", 5: "f go"}


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
