"""Branches of groups that go on from one rollout to the next."""

from collections import Counter
from functools import partial

import pytest
from conftest import build_tokenizer
from datasets import Dataset
from scripted_actors import ScriptedEngine, ScriptedStream, make_actor
from toy_environments import Countdown, Forgetful, Slow

from g2po_trl import EnvironmentPool, StateGraph, read_jsonl
from g2po_trl.engines.sampling import Sampling
from g2po_trl.experimental.branching.branching import Branching
from g2po_trl.experimental.branching.rules import least_visited
from g2po_trl.experimental.partial_rollouts import Rolling
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.player import Player


@pytest.fixture(scope="module")
def encode():
    return ChatEncoder(build_tokenizer())


def choose(groups, budget):
    return least_visited(StateGraph.from_groups(groups), budget)


def make_rolling(pool, actor, tasks, held_back=2, ahead=1, rule=choose, max_turns=5):
    return Rolling(Player(pool, actor, max_turns), 4, ahead, tasks, 0, branching=Branching(held_back, 4, rule))


def rollouts_of(rolling, tasks, iterations, size=2):
    order = iter(range(10**6))
    for version in range(1, iterations + 1):
        rows = [dict(tasks[next(order) % len(tasks)]) for _ in range(size)]
        yield version, *rolling.play([row for row in rows for _ in range(4)], Sampling(max_tokens=8), version)


@pytest.mark.parametrize("kind", [ScriptedStream, ScriptedEngine])
@pytest.mark.parametrize("ahead", [1, 2])
def test_branches_of_failed_groups(encode, kind, ahead):
    """Tasks 2 and 4 are always won; in the others half of each group continues the first episodes."""
    tasks = [{"task_id": str(n), "turns": n, "reward": 10.0 * (n in (2, 4))} for n in (1, 2, 3, 9, 4, 5)]
    trained, opened, most = Counter(), [], []
    with EnvironmentPool(Countdown, num_workers=2) as pool:
        rolling = make_rolling(pool, make_actor(encode, kind), tasks, ahead=ahead)
        begin, open_group = pool.begin, rolling._open

        def watched(*arguments):
            slots = begin(*arguments)
            most.append(len(pool._scheduler.episodes))
            return slots

        pool.begin = watched
        rolling._open = lambda task, version: opened.append(task["task_id"]) or open_group(task, version)
        replayed = 0
        for version, trajectories, stats in rollouts_of(rolling, tasks, 8):
            replayed += stats.replayed_steps
            for group in (trajectories[:4], trajectories[4:]):
                turns = int(group[0].task_id)
                trained[group[0].task_id] += 1
                assert len({t.task_id for t in group}) == 1 and not any(t.error for t in group)
                branches = [t for t in group if t.parent is not None]
                assert len(branches) == (0 if turns in (1, 2, 4) else 2)
                assert [t.parent is None for t in group] == [True] * 2 + [not branches] * 2
                for branch in branches:
                    parent = group[branch.parent]
                    assert branch.steps[0].observation == parent.steps[branch.start].observation
                    assert branch.start + len(branch.steps) == min(turns, 5) == len(parent.steps)
                    assert parent.steps[-1].policy_version <= branch.steps[0].policy_version
                versions = [step.policy_version for t in group for step in t.steps]
                assert version - ahead <= min(versions) and max(versions) <= version
        left = [group.task["task_id"] for group in rolling.groups]
        assert max(most) <= 8 and trained + Counter(left) == Counter(opened)
        assert sum(trained.values()) == 16 and replayed > 0
        waiting = [episode for group in rolling.groups for episode in group.held_back]
        assert not set(rolling._seeds) - set(rolling._group_of)
        assert {e.number for e in waiting} <= set(rolling._group_of)


def test_older_groups_go_first(encode):
    """What was held back in an older group begins before that of a newer one, and before groups that begin."""
    tasks = [{"task_id": str(n), "turns": 3, "reward": 0.0} for n in range(3)]
    with EnvironmentPool(Countdown, num_workers=1) as pool:
        rolling = make_rolling(pool, make_actor(encode), tasks, rule=lambda groups, budget: [])
        for task in tasks:
            rolling._open(task, 1)
        rolling._to_begin.clear()
        newest = rolling.groups[2].members[:2]
        rolling._to_begin.extend(newest)
        for group in (rolling.groups[1], rolling.groups[0]):
            rolling._begin_held_back(group)
        wanted = [*rolling.groups[0].members[2:], *rolling.groups[1].members[2:], *newest]
        assert list(rolling._to_begin) == wanted


def test_a_state_that_nobody_can_return_to(encode):
    """Its first branches are errors, of groups that are trained like others; then the task is not branched."""
    tasks = [{"task_id": "a", "turns": 4, "reward": 0.0}]
    late = lambda groups, budget: [(0, 3)]  # noqa: E731
    with EnvironmentPool(Forgetful, num_workers=2) as pool:
        rolling = make_rolling(pool, make_actor(encode), tasks, rule=late)
        outcomes = [[t.outcome for t in played] for _, played, _ in rollouts_of(rolling, tasks, 5)]
        assert rolling.branching.no_return == {"a"}
    assert "error" in outcomes[0] and "error" not in outcomes[-1]
    assert all(len(played) == 8 for played in outcomes)


def test_a_rule_that_fails(encode):
    """The groups that were open are played again, before all others."""
    tasks = [{"task_id": str(n), "turns": 2, "reward": 0.0} for n in range(4)]
    with EnvironmentPool(Countdown, num_workers=2) as pool:
        actor = make_actor(encode, ScriptedEngine)
        rolling = make_rolling(pool, actor, tasks, rule=lambda groups, budget: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(rollouts_of(rolling, tasks, 1))
        assert not pool._scheduler.episodes and not rolling.groups
        assert len(rolling.queue) == 4 and [task["task_id"] for task in rolling.queue][:2] == ["0", "1"]
        rolling.branching.choose = choose
        _, played, _ = next(rollouts_of(rolling, tasks, 1))
    assert len(played) == 8 and sum(t.parent is not None for t in played) == 2


def test_others_play_in_between(encode):
    """A panel, while the first episodes of open groups end and their branches wait."""
    tasks = [{"task_id": str(n), "turns": n, "reward": 0.0} for n in (3, 4)]
    with EnvironmentPool(partial(Slow, 0.01), num_workers=2) as pool:
        rolling = make_rolling(pool, make_actor(encode), tasks)
        for _, played, _ in rollouts_of(rolling, tasks, 4):
            panel, _ = rolling.player.play([{"turns": 2}] * 3)
            assert [t.outcome for t in panel] == ["success"] * 3
            assert len(played) == 8 and sum(t.parent is not None for t in played) == 4


def test_training_and_resuming(make_trainer, tmp_path):
    tasks = Dataset.from_list([{"turns": 2 + n % 3, "reward": 0.0, "task_id": str(n)} for n in range(8)])
    options = {"environment": Countdown, "dataset": tasks, "rollouts_ahead": 1, "branch_share": 0.5}
    options |= {"save_strategy": "steps", "save_steps": 2}
    first = make_trainer(**options, max_steps=2)
    first.branching.no_return = {"3"}
    first.train()
    second = make_trainer(**options, max_steps=4)
    second.train(resume_from_checkpoint="latest")
    assert second.branching.no_return == {"3"} and second.state.global_step == 4
    entries = [entry for entry in second.state.log_history if "episode/success_rate" in entry]
    for number, entry in enumerate(entries, 1):
        played = list(read_jsonl(tmp_path / "out" / "trajectories" / f"train-{number:06}.jsonl"))
        branched = [t for t in played if t.parent is not None]
        assert entry["rollout/episodes"] == len(played) == 8 and entry["rollout/branches"] == len(branched)
        assert not {t.task_id for t in branched} & {"3"} and len(branched) >= 2
        assert entry["update/step_samples"] == sum(len(t.steps) for t in played)
        assert entry["rollout/max_age"] <= 1
