"""Episodes in two halves: the same episodes, environments at work while the model is, lost workers accounted for."""

from functools import partial

import pytest
from scripted_actors import ScriptedActor
from toy_environments import Countdown, Dying, Waiting

from g2po_trl import EnvironmentPool
from g2po_trl.rollout.player import Player


def play(environment, tasks, act=None, overlap=True, max_turns=4, workers=2, groups=None):
    asked = []

    def go(live):
        asked.append([episode.number for episode in live])
        return [episode.step("go", "go", **(act(episode) if act else {}) or {}) for episode in live]

    with EnvironmentPool(environment, num_workers=workers, step_timeout=20) as pool:
        player = Player(pool, ScriptedActor(go), max_turns, overlap)
        trajectories, cost = player.play(tasks, groups=groups)
    return trajectories, cost, asked


@pytest.mark.parametrize("turns", [(1, 3, 2, 9, 4), (2,), (1, 1), ()])
def test_the_same_episodes_and_no_request_more(turns):
    tasks = [{"turns": n} for n in turns]
    apart, cost_apart, asked_apart = play(Countdown, tasks, overlap=False)
    halves, cost, asked = play(Countdown, tasks)
    assert halves == apart
    assert (cost.turns, cost.live_steps) == (cost_apart.turns, cost_apart.live_steps)
    assert sorted(sum(asked, [])) == sorted(sum(asked_apart, []))
    assert all(len({number % 2 for number in part}) <= 1 for part in asked)


@pytest.mark.parametrize("overlap", [True, False])
def test_environments_work_while_the_other_half_is_asked(tmp_path, overlap):
    def act(episode):
        if overlap or episode.number == 0:  # apart, both are asked before either steps: nothing would be shown
            (tmp_path / f"asked-{episode.number}-{len(episode.steps) + 1}").touch()

    trajectories, cost, _ = play(partial(Waiting, tmp_path), [{"number": 0}, {"number": 1}], act, overlap)
    outcomes = ["failure", "failure"] if overlap else ["error", "failure"]
    assert [t.outcome for t in trajectories] == outcomes and cost.turns == 3


def test_a_worker_that_dies_in_one_half_costs_one_episode():
    tasks = [{"turns": 3, "reward": 13.0 if i == 2 else 10.0} for i in range(8)]
    trajectories, _, _ = play(Dying, tasks, groups=[0, 0, 0, 0, 1, 1, 1, 1])
    assert [t.outcome for t in trajectories] == ["error" if i == 2 else "success" for i in range(8)]
    assert "SIGKILL" in trajectories[2].error and len({t.steps[-1].observation for t in trajectories[:2]}) == 1


def test_training_with_overlap(make_trainer):
    trainer = make_trainer(overlap_environments=True, max_steps=2)
    trainer.train()
    assert [log["episode/error_rate"] for log in trainer.state.log_history if "episode/error_rate" in log] == [0, 0]
