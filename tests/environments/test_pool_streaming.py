"""Answers come when they are ready, whatever other episodes and workers do, and as in an undisturbed run."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from refusals import refused
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.pool import EnvironmentFailure

held = []


class Obedient(TextEnvironment):
    """Does what the action says; when its steps are done, the episode is over."""

    def reset(self, name="", length=1000, fault=""):
        self.name, self.left = name, length
        if fault == "exit":
            os._exit(3)
        return Observation(f"{name} begins", state_key=str(os.getpid()))

    def step(self, action):
        self.left -= 1
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action == "grow":
            held.append(os.urandom(1) * 150_000_000)
        if action.startswith("big"):
            Path(action.removeprefix("big ")).touch()
        info = {"much": "x" * 5_000_000} if action.startswith("big") else {}
        return StepResult(Observation(f"{self.name} {action}"), 1.0, terminated=self.left == 0, info=info)


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
    pool.send({0: "sleep 0.8", 1: "go"})
    for _ in range(5):
        assert texts(pool.receive(timeout=None)) == {1: "b go"}
        pool.send({1: "go"})
    assert texts(received(pool, [0, 1])) == {0: "a sleep 0.8", 1: "b go"}


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


def test_the_same_answers_whatever_the_workers_and_as_of_reset_and_step():
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
    time.sleep(2.1)  # as during an update
    assert texts(pool.step({0: "go"})) == {0: "a go"} and pool.worker_pids == before


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
        pool.begin([{"name": name} for name in "ab"])
        received(pool, range(2))
        (old,) = pool.worker_pids
        pool.step({0: "grow"})
        pool.end([0])  # playing it again would grow the next one, too
        pool.begin([{"name": "c"}])  # looks at the memory
        pool.send({1: "go"})
        assert texts(received(pool, range(2))) == {0: "c begins", 1: "b go"}
        assert pool.recycled == pool.replayed == 1 and old not in pool.worker_pids


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
        live = [slot for slot, answers in enumerate(seen) if not isinstance(answers[-1], EnvironmentFailure)]
        for slot, result in pool.step({slot: faults.get((slot, turn), action) for slot in live}).items():
            seen[slot].append(result)
    return seen


@pytest.mark.parametrize(("fault", "kind"), [("hang", "timeout"), ("kill", "crash")])
def test_one_of_eight_goes_wrong_and_seven_are_played_to_their_ends(fault, kind):
    this = psutil.Process()
    with EnvironmentPool(Mortal, PoolLimits(1, environment_step_timeout=2)) as pool:
        undisturbed = walk(pool, [{}] * 8, {})
        assert all(answers[-1].terminated for answers in undisturbed)
        before, files, children = pool.worker_pids, this.num_fds(), len(this.children(recursive=True))
        seen = walk(pool, [{}] * 8, {(3, 2): fault})
        assert [seen[slot] == undisturbed[slot] for slot in range(8)] == [slot != 3 for slot in range(8)]
        assert seen[3][:3] == undisturbed[3][:3] and seen[3][3].kind == kind and "slot 3" in seen[3][3].message
        assert pool.replayed == 7 and pool.worker_pids != before
        left = this.num_fds(), len(this.children(recursive=True))
        assert left == (files, children), "no file, no process, no zombie"


def test_a_worker_that_is_killed_while_idle_costs_no_episode():
    with EnvironmentPool(Mortal, PoolLimits(2)) as pool:
        undisturbed = walk(pool, [{}] * 4, {})
        first = pool.reset([{}] * 4)
        for turn, action in enumerate(WALK):
            os.kill(pool.worker_pids[turn % 2], signal.SIGKILL)
            results = pool.step(dict.fromkeys(range(4), action))
            assert [results[slot] for slot in range(4)] == [undisturbed[slot][turn + 1] for slot in range(4)]
        assert first == [answers[0] for answers in undisturbed]


def test_when_all_steps_hang_three_limits_pass():
    with EnvironmentPool(Mortal, PoolLimits(1, environment_step_timeout=0.5)) as pool:
        pool.reset([{}] * 8)
        results = pool.step(dict.fromkeys(range(8), "hang"))
        assert {result.kind for result in results.values()} == {"timeout"}
        assert ["given up" in results[slot].message for slot in range(8)] == [False] * 3 + [True] * 5


def test_an_import_that_hangs_is_said_and_nothing_waits_for_ever(tmp_path, monkeypatch):
    """Also when a task is larger than what a pipe holds."""
    (tmp_path / "late_import.py").write_text(
        f"import os, time\nfrom g2po_trl import TextEnvironment\nif {os.getpid()} != os.getpid(): time.sleep(60)\n"
        "class Late(TextEnvironment): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from late_import import Late

    with EnvironmentPool(Late, PoolLimits(1, environment_load_timeout=1)) as pool:
        results = pool.reset([{"text": "x" * 3_000_000}] * 4)
        assert {result.kind for result in results} == {"timeout"} and "took more than 1 s" in results[3].message
