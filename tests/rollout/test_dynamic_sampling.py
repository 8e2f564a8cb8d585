"""Dynamic sampling: which groups are replaced, how often, by which tasks, and where replaced ones count."""

from toy_environments import Countdown

from g2po_trl import Trajectory, read_jsonl
from g2po_trl.rollout.dynamic_sampling import DynamicSampling, equal_reward_groups
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.rollout.strategy import RolloutContext


def test_equal_reward_groups_skip_episodes_without_a_result():
    paid = {0: [0, 10], 1: [10, 10], 2: [0, 0, None], 3: [None, None], 4: [0, 0.5, 0]}
    assert equal_reward_groups((group, reward) for group, rewards in paid.items() for reward in rewards) == [1, 2, 3]


class Rollouts:
    """A player: rewards of tasks in capitals differ; every call is recorded."""

    max_turns = 3

    def __init__(self, excluded=()):
        self.calls, self.excluded = [], excluded

    def play(self, rows, sampling, groups, on_turn):
        self.calls.append([(group, row["task_id"]) for group, row in zip(groups, rows)])
        tasks = enumerate(row["task_id"] for row in rows)
        played = [Trajectory(task, [], 10.0 * (number % 2) * task.isupper(), "success") for number, task in tasks]
        return played, RolloutStats(turns=3, num_steps=len(rows), total_time=1.0)


def rows_of(names):
    """Two rows of each task, and their groups."""
    return [{"task_id": name} for name in names for _ in range(2)], [n for n in range(len(names)) for _ in range(2)]


def make_strategy(player, names, budget, seed=0):
    context = RolloutContext(player, 2, [{"task_id": name} for name in names], seed)
    return DynamicSampling(context, max_generation_batches=budget)


def tasks_of(strategy, iteration):
    return [row["task_id"] for row in strategy._other_tasks(["a", "B"], iteration)]


def test_groups_are_replaced_until_all_have_spread():
    rollouts, (rows, groups) = Rollouts(excluded={"G"}), rows_of("aBc")
    strategy = make_strategy(rollouts, "aBcDeFG", 5)
    played = strategy.collect(rows, groups, 4)
    order = [name for name in tasks_of(strategy, 4) if name != "c"]
    assert set(order) == {"D", "e", "F"}, "none of this rollout, and none that is set aside"
    assert all(trajectory.task_id.isupper() for trajectory in played.trajectories)
    assert [trajectory.task_id for trajectory in played.trajectories[2:4]] == ["B", "B"]
    assert rollouts.calls[1] == [(0, order[0]), (0, order[0]), (2, order[1]), (2, order[1])]
    replaced = [trajectory.task_id for trajectory in played.replaced]
    assert replaced[:4] == ["a", "a", "c", "c"]
    assert played.replaced_groups[:4] == [(1, 0), (1, 0), (1, 2), (1, 2)]
    tasks = set(zip(played.replaced_groups, replaced))
    assert len(tasks) == len(set(played.replaced_groups)) > 2, "states of two tasks are never merged as one group's"
    assert len(played.all) == sum(map(len, rollouts.calls)) == played.stats.num_steps
    assert (played.stats.turns, played.stats.total_time) == (3, len(rollouts.calls))


def test_it_ends():
    """When the budget is spent, or no task is left; 1 plays nothing again."""
    few, many = "abc", "abcdefghijkl"
    for budget, names, groups_played in ((1, many, 2), (2, many, 4), (3, many, 6), (9, few, 3)):
        rollouts, (rows, groups) = Rollouts(), rows_of("ab")
        played = make_strategy(rollouts, names, budget).collect(rows, groups, 1)
        assert sum(len({group for group, _ in call}) for call in rollouts.calls) == groups_played
        assert len(played.trajectories) == 4 and len(played.replaced) == 2 * (groups_played - 2)


def test_another_rollout_draws_others():
    strategy, other = (make_strategy(Rollouts(), map(str, range(50)), 2, seed) for seed in (0, 1))
    assert tasks_of(strategy, 1) == tasks_of(strategy, 1) != tasks_of(strategy, 2)
    assert tasks_of(strategy, 1) != tasks_of(other, 1)


def test_training(make_trainer, tmp_path):
    """Of an environment that pays every episode the same."""
    from datasets import Dataset

    tasks = [{"turns": 1 + number % 2, "reward": 10.0 + number} for number in range(8)]
    options = {"rollout_strategy": "dynamic_sampling", "rollout_strategy_kwargs": {"max_generation_batches": 3}}
    trainer = make_trainer(Countdown, dataset=Dataset.from_list(tasks), max_steps=1, save_trajectories=True, **options)
    opened, rollout = [], trainer.player.actor.engine._open
    trainer.player.actor.engine._open = lambda: opened.append(1) or rollout()
    trainer.train()
    assert len(opened) == 1, "the engine gets the weights once"
    (entry,) = (log for log in trainer.state.log_history if "episode/success_rate" in log)
    first = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    assert entry["rollout/episodes"] == first * 3, "all are paid the same, so all are replaced"
    folder = tmp_path / "out/trajectories"
    replaced = list(read_jsonl(folder / "replaced-000001.jsonl"))
    assert len(list(read_jsonl(folder / "train-000001.jsonl"))) == first and len(replaced) == first * 2
    assert entry["episode/success_rate"] == 1
