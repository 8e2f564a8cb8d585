"""The pool with environments that raise or answer nonsense: an episode fails alone, whatever the workers."""

import math

import numpy as np
import pytest
from faulty_pools import Reporter, faulty_pool, pids
from letter_environment import LetterEnvironment
from refusals import refused

from g2po_trl import EnvironmentPool, Observation, PoolLimits, Step, StepResult, read_jsonl, write_jsonl
from g2po_trl.environments.validation import validate_step
from g2po_trl.rollout.episode import Episode


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(Reporter, PoolLimits(2, 20, 20, max_observation_characters=1000)) as pool:
        yield pool


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


def test_a_bad_reset_or_step_fails_its_own_episode_alone(pool):
    faults = {1: ("raise", "exception"), 3: (5, "invalid")}
    results = pool.reset([{"seed": i, **({"fault": faults[i][0]} if i in faults else {})} for i in range(6)])
    assert {slot: results[slot].kind for slot in faults} == {slot: kind for slot, (_, kind) in faults.items()}
    assert [results[i].text for i in (0, 2, 4, 5)] == ["seed 0", "seed 2", "seed 4", "seed 5"]
    results = pool.step({0: "raise", 2: "result nan", 4: "go", 5: "result none"})
    assert {slot: results[slot].kind for slot in (0, 2, 5)} == {0: "exception", 2: "invalid", 5: "invalid"}
    with refused("slot 0"):
        pool.step({0: "go"})
    assert [results[4].observation.text, pool.step({4: "go"})[4].observation.text] == ["4 go 1", "4 go 2"]
    assert len(pool.reset([{"seed": 7}] * 4)) == 4


def test_bad_arguments():
    running = (i for i in range(3))
    for factory, options, field in (
        (lambda: next(running) or LetterEnvironment(), {}, "environment_factory"),
        (LetterEnvironment, {"num_environment_workers": 0}, "num_environment_workers"),
        (LetterEnvironment, {"environment_variables": ["NOT_SET"]}, "environment_variables"),
    ):
        with refused(field):
            EnvironmentPool(factory, PoolLimits(**options))
    with EnvironmentPool(LetterEnvironment, PoolLimits(2)) as pool:
        for tasks, groups, field in (([{"seed": 0}], [0, 1], "groups"), ([{"seed": lambda: 0}], None, "tasks")):
            with refused(field):
                pool.reset(tasks, groups)
    with refused("EnvironmentPool"):  # it is closed
        pool.reset([{"seed": 0}])


ITSELF = {}
ITSELF["itself"] = ITSELF  # a reference cycle


@pytest.mark.parametrize(
    ("result", "field"),
    [
        *((StepResult("x", reward), "reward") for reward in (np.array([1.0]), 10**400, -math.inf, True, "1")),
        (StepResult("x", terminated="no"), "terminated"),
        (StepResult("x", truncated=1), "truncated"),
        (StepResult("x", info=ITSELF), "info"),
        (StepResult("x", info=[1]), "info"),
        (StepResult("x", info={"score": math.nan}), "info['score']"),
        (StepResult("x", info={"success": [True]}), "info['success']"),
        (StepResult(Observation("half \ud83d")), "Observation.text"),
        (StepResult(Observation(3)), "Observation.text"),
        (StepResult(Observation("x", state_key=3)), "Observation.state_key"),
        (StepResult(Observation("x", admissible_actions="go")), "Observation.admissible_actions"),
        (StepResult(Observation("x", request="go")), "Observation.request"),
        (StepResult(Observation("x", images=3)), "Observation.images"),
        (StepResult("x" * 10), "max_observation_characters"),
        (StepResult(b"x"), "step"),
        (("x", 1.0), "step"),
    ],
)
def test_what_an_environment_may_not_return_is_refused_by_its_field(result, field):
    with refused(field):
        validate_step(result, "step", PoolLimits(max_observation_characters=9))


def test_numpy_values_and_nonsense_in_info_arrive_as_plain_data(tmp_path):
    """A whole run would end at its first trajectory otherwise."""
    with faulty_pool() as pool:
        pool.reset([{}])
        result = pool.step({0: "result numpy"})[0]
    assert (type(result.reward), result.reward, result.terminated) == (float, 0.5, True)
    assert result.observation.admissible_actions == ["a", "b"]
    plain = {"success": True, "score": 0.5, "counts": [1, 2], "loss": None, "path": "half \ud800", "1": [None, None]}
    assert {name: value for name, value in result.info.items() if name != "object"} == plain
    assert "Unloadable" in result.info["object"]
    episode = Episode("task", observation=Observation("x"), steps=[Step("x", "a")])
    episode.advance(result)
    write_jsonl(tmp_path / "t.jsonl", [episode.trajectory()])
    (read,) = read_jsonl(tmp_path / "t.jsonl")
    assert read.success and read.info == {**result.info, "path": "half ?"}
