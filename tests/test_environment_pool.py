"""The pool with faults injected for real: processes are killed, hang and raise."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from letter_environment import LetterEnvironment

from g2po_trl import EnvironmentPool, Observation, StepResult, TextEnvironment
from g2po_trl.environment_check import EnvironmentContractError
from g2po_trl.environment_pool import EnvironmentFailure


class Reporter(TextEnvironment):
    """Tells its process and its object; does what the action says."""

    def reset(self, seed=0, fault=None):
        self.seed, self.steps = seed, 0
        if fault == "raise":
            raise RuntimeError("no such house")
        if fault == "hang":
            time.sleep(60)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None:
            return fault
        return Observation(f"seed {seed}", state_key=f"{os.getpid()} {id(self)}")

    def step(self, action):
        self.steps += 1
        if action == "raise":
            raise RuntimeError("the door is stuck")
        if action == "hang":
            time.sleep(60)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "nan":
            return StepResult("x", reward=float("nan"))
        if action == "none":
            return None
        if action == "lambda":
            return StepResult("x", info={"f": (i for i in ())})
        if action == "long":
            return StepResult("x" * 2000)
        return StepResult(f"{self.seed} {action} {self.steps}", reward=self.steps, terminated=action == "end")


@pytest.fixture
def pool():
    with EnvironmentPool(
        Reporter, num_workers=2, step_timeout=2, reset_timeout=10, max_observation_characters=1000
    ) as p:
        yield p


def pids(observations):
    return [o.state_key.split()[0] for o in observations]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_many_episodes_in_few_processes_and_groups_together(pool):
    tasks = [{"seed": i} for i in range(128)]
    groups = [i // 8 for i in range(128)]
    observations = pool.reset(tasks, groups)
    assert [o.text for o in observations] == [f"seed {i}" for i in range(128)]
    assert len(set(pids(observations))) == 2
    for group in range(16):
        assert len(set(pids(observations)[8 * group : 8 * group + 8])) == 1
    assert len({o.state_key for o in observations}) == 128, "an environment of its own for each episode"
    again = pool.reset(tasks, groups)
    assert {o.state_key for o in again} == {o.state_key for o in observations}, "objects are kept and reset"


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_do_not_depend_on_workers(num_workers):
    with EnvironmentPool(Reporter, num_workers=num_workers) as pool:
        pool.reset([{"seed": i} for i in range(5)])
        assert pool.step({3: "go", 0: "end"}) == {
            3: StepResult(Observation("3 go 1"), 1.0),
            0: StepResult(Observation("0 end 1"), 1.0, terminated=True),
        }
        assert pool.step({3: "go"})[3].observation.text == "3 go 2"


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raise", "exception", "the door is stuck"),
        ("nan", "invalid", "reward is nan"),
        ("none", "invalid", "returned None"),
        ("lambda", "invalid", "pickle"),
        ("long", "invalid", "2000 characters"),
    ],
)
def test_a_bad_step_fails_its_own_episode_alone(pool, fault, kind, message):
    pool.reset([{"seed": i} for i in range(4)])
    results = pool.step({0: "go", 1: fault, 2: "go", 3: "go"})
    assert results[1].kind == kind and message in results[1].message and "Reporter" in results[1].message
    assert [results[i].observation.text for i in (0, 2, 3)] == ["0 go 1", "2 go 1", "3 go 1"]
    with pytest.raises(ValueError, match="slot 1"):
        pool.step({1: "go"})
    assert pool.step({0: "go"})[0].observation.text == "0 go 2"
    assert len(pool.reset([{"seed": 7}] * 4)) == 4


@pytest.mark.parametrize(("fault", "kind"), [("kill", "crash"), ("hang", "timeout")])
def test_a_lost_worker_takes_its_episodes_and_is_replaced(pool, fault, kind):
    first = pool.reset([{"seed": i} for i in range(6)])
    before = pool.worker_pids
    results = pool.step({i: fault if i == 2 else "go" for i in range(6)})
    home = pids(first)
    for slot in range(6):
        if home[slot] == home[2]:
            assert results[slot].kind == kind and "slot 2" in results[slot].message
        else:
            assert results[slot].observation.text == f"{slot} go 1"
    assert not alive(int(home[2]))
    assert [o.text for o in pool.reset([{"seed": i} for i in range(6)])] == [f"seed {i}" for i in range(6)]
    assert len(pool.worker_pids) == 2 and set(pool.worker_pids) != set(before)


def test_a_worker_killed_from_outside(pool):
    first = pool.reset([{"seed": i} for i in range(4)])
    os.kill(int(pids(first)[0]), signal.SIGKILL)
    results = pool.step(dict.fromkeys(range(4), "go"))
    failed = {i for i in range(4) if isinstance(results[i], EnvironmentFailure)}
    assert failed == {i for i in range(4) if pids(first)[i] == pids(first)[0]}
    assert all(results[i].kind == "crash" and "SIGKILL" in results[i].message for i in failed)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raise", "exception", "no such house"),
        (5, "invalid", "returned 5"),
        ("kill", "crash", "SIGKILL"),
    ],
)
def test_a_bad_reset_fails_its_own_episode_alone(pool, fault, kind, message):
    tasks = [{"seed": i, **({"fault": fault} if i == 2 else {})} for i in range(6)]
    results = pool.reset(tasks)
    assert results[2].kind == kind and message in results[2].message
    assert [results[i].text for i in range(6) if i != 2] == [f"seed {i}" for i in range(6) if i != 2]
    assert len(pool.step({i: "go" for i in range(6) if i != 2})) == 5


def test_check_says_what_is_wrong(pool):
    pool.check({"seed": 1})
    with pytest.raises(EnvironmentContractError, match="no such house"):
        pool.check({"fault": "raise"})


def test_close_leaves_no_process_behind():
    pool = EnvironmentPool(Reporter, num_workers=3)
    pool.reset([{}] * 3)
    running = pool.worker_pids
    assert len(running) == 3 and all(map(alive, running))
    pool.close()
    pool.close()
    assert not any(map(alive, running))
    with pytest.raises(ValueError, match="closed"):
        pool.reset([{}])


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    script = tmp_path / "train.py"  # without the guard, and with a class of its own
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from g2po_trl import EnvironmentPool, StepResult, TextEnvironment

            class Mine(TextEnvironment):
                def reset(self):
                    return f"process {os.getpid()}"
                def step(self, action):
                    return StepResult("x")

            print("started", flush=True)
            pool = EnvironmentPool(Mine, num_workers=1)
            print(pool.reset([{}])[0].text, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60).stdout
    assert output.count("started") == 1, "the script ran once"
    pid = int(output.split()[-1])
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def test_bad_arguments():
    running = (i for i in range(3))
    with pytest.raises(ValueError, match="cannot be sent"):
        EnvironmentPool(lambda: next(running) or LetterEnvironment())
    with pytest.raises(ValueError, match="num_workers is 0"):
        EnvironmentPool(LetterEnvironment, num_workers=0)
    with EnvironmentPool(LetterEnvironment, num_workers=1) as pool, pytest.raises(ValueError, match="one group"):
        pool.reset([{"seed": 0}], groups=[0, 1])
