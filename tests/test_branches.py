"""Episodes that continue others: the same states to the letter, the turns that are left, and what is counted."""

import random
from functools import partial

import pytest
from conftest import build_tokenizer
from datasets import Dataset
from scripted_actors import ScriptedActor, ScriptedEngine, ScriptedStream
from toy_environments import Countdown, Forgetful

from g2po_trl import EnvironmentPool, PromptTemplate, read_jsonl
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.branching import Branching
from g2po_trl.rollout.encoding import ChatEncoder
from g2po_trl.rollout.episodes import NOT_RETURNED, Branch
from g2po_trl.rollout.generation import Reply
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.prompting import parse_plain

TEMPLATE = PromptTemplate("{task}|{observation}", "{steps_taken}|{history}|{observation}", parse_reply=parse_plain)
ENGINES = [ScriptedEngine, ScriptedStream]


@pytest.fixture(scope="module")
def encode():
    return ChatEncoder(build_tokenizer())


def make_player(pool, encode, kind, max_turns=6, watch=None):
    def answer(prompts):
        for prompt in prompts if watch else ():
            watch(encode.tokenizer.decode(prompt))
        return [Reply(encode.tokenizer("go")["input_ids"]) for _ in prompts]

    return Player(pool, PromptActor(kind(encode.tokenizer, answer), encode, TEMPLATE), max_turns)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_branch_goes_on_where_its_parent_was(encode, kind):
    """Its observations, prompts and turns are the parent's from there on; it ends when the parent's time would."""
    asked = []
    with EnvironmentPool(Countdown, num_workers=2) as pool:
        player = make_player(pool, encode, kind, max_turns=6, watch=asked.append)
        tasks = [{"turns": 4, "reward": 3.0}, {"turns": 9}]
        (short, long), _ = player.play(tasks)
        prompts, asked[:] = sorted(asked), []
        branches = [Branch(0, short.steps[:3]), Branch(1, long.steps[:5]), None, Branch(0, short.steps[:2])]
        found, stats = player.play([tasks[0], tasks[1], tasks[0], tasks[0]], groups=[0, 0, 0, 0], branches=branches)
    assert [(t.parent, t.start, len(t.steps), t.outcome) for t in found] == [
        (0, 2, 2, "success"),
        (1, 4, 2, "truncated"),
        (None, 0, 4, "success"),
        (0, 1, 3, "success"),
    ]
    assert found[0].steps == short.steps[2:] and found[3].steps == short.steps[1:]
    assert found[1].steps == long.steps[4:], "six turns in all"
    assert stats.replayed_steps == 2 + 4 + 1 and stats.turns == 4 and stats.live_steps == 2 + 2 + 4 + 3
    assert set(asked) <= set(prompts) and found[0].reward == 3.0


@pytest.mark.parametrize("kind", ENGINES)
def test_an_environment_that_nobody_can_return_to(encode, kind):
    with EnvironmentPool(Forgetful, num_workers=2) as pool:
        player = make_player(pool, encode, kind)
        (parent,), _ = player.play([{"turns": 4}])
        found, _ = player.play([{"turns": 4}] * 3, branches=[Branch(0, parent.steps[:n]) for n in (2, 3, 4)])
    assert [t.outcome for t in found] == ["success", "success", "error"]
    assert found[2].error.startswith(f"{NOT_RETURNED}: before step 4, the observation is 'left 1 ")
    assert not found[2].steps


def test_a_parent_that_was_longer_than_the_episode(encode):
    with EnvironmentPool(Countdown, num_workers=1) as pool:
        player = make_player(pool, encode, ScriptedEngine)
        (parent,), _ = player.play([{"turns": 5}])
        for step in parent.steps:
            step.observation = step.observation.replace("5", "2").replace("4", "1")
            step.state_key = step.state_key.replace("5", "2").replace("4", "1")
        (found,), _ = player.play([{"turns": 2}], branches=[Branch(0, parent.steps[:4])])
        (other,), _ = player.play([{"turns": 3, "task_id": "x"}], branches=[Branch(0, parent.steps[:2])])
    assert found.outcome == "error" and "parent's went on" in found.error
    assert other.outcome == "error" and "the observation is 'left 3', and was 'left 2'" in other.error


class Plays:
    """Stands for the player: every episode has three steps; tells what it was asked for."""

    def __init__(self, outcome="failure", error=None):
        self.calls, self.outcome, self.error = [], outcome, error

    def __call__(self, rows, groups, branches):
        from g2po_trl import Step, Trajectory
        from g2po_trl.rollout.stats import RolloutStats

        self.calls.append([(row["task_id"], group, branch) for row, group, branch in zip(rows, groups, branches)])
        played = []
        for row, branch in zip(rows, branches):
            error = self.error if branch else None
            steps = [] if error else [Step(name, "go") for name in "abc"]
            origin = {"parent": branch.parent, "start": len(branch.steps) - 1} if branch else {}
            played.append(
                Trajectory(row["task_id"], steps, 0.0, "error" if error else self.outcome, error=error, **origin)
            )
        return played, RolloutStats(live_steps=len(rows))


def test_what_is_held_back_is_played_as_the_rule_says():
    rows, groups = [{"task_id": name} for name in "xxxxyyyy"], [7] * 4 + [8] * 4
    seen = []

    def choose(groups, budget):
        seen.append(([[t.task_id for t in group] for group in groups], budget))
        return [(3, 1)]

    plays = Plays()
    trajectories, stats = Branching(2, 4, choose).play(plays, rows, groups)
    assert seen == [([["x", "x"], ["y", "y"]], 2)]
    first, second = plays.calls
    assert first == [("x", 7, None)] * 2 + [("y", 8, None)] * 2
    assert [(name, group, branch and (branch.parent, len(branch.steps))) for name, group, branch in second] == [
        ("x", 7, None),
        ("x", 7, None),
        ("y", 8, (1, 2)),
        ("y", 8, None),
    ]
    assert [(t.task_id, t.parent) for t in trajectories] == [("x", None)] * 4 + [("y", None)] * 2 + [
        ("y", 1),
        ("y", None),
    ]
    assert stats.live_steps == 8


def test_a_task_that_cannot_be_returned_to_is_not_branched_again():
    rows, groups = [{"task_id": "x"}] * 4, [0] * 4
    branching = Branching(1, 4, lambda groups, budget: [(0, 1)])
    for expected in (True, False):
        plays = Plays(error=f"{NOT_RETURNED}: whatever")
        branching.play(plays, rows, groups)
        assert (plays.calls[1][0][2] is not None) == expected
    again = Branching(1, 4, branching.choose)
    again.restore(branching.state())
    assert again.no_return == {"x"}


@pytest.mark.parametrize("point", [(0, 0), (0, 3), (5, 1), (-1, 1)])
def test_a_rule_that_names_what_is_not_there(point):
    branching = Branching(1, 4, lambda groups, budget: [point])
    with pytest.raises(ValueError, match=f"choose_branches returned trajectory {point[0]}, position {point[1]}"):
        branching.play(Plays(), [{"task_id": "x"}] * 4, [0] * 4)


def test_training(make_trainer, tmp_path):
    """Every episode fails, so half of each group continues others; they are trained, and no success rate has them."""
    tasks = Dataset.from_list([{"turns": 3, "reward": 0.0, "success": False, "task_id": str(n)} for n in range(8)])
    trainer = make_trainer(Countdown, dataset=tasks, branch_share=0.5, max_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    for number, entry in enumerate(entries, 1):
        assert entry["rollout/branches"] == 4 and entry["rollout/episodes"] == 8
        assert entry["episode/episodes"] == 4 and entry["rollout/replayed_steps"] > 0
        played = list(read_jsonl(tmp_path / "out" / "trajectories" / f"train-{number:06}.jsonl"))
        branches = [t for t in played if t.parent is not None]
        assert len(played) == 8 and len(branches) == 4 and {t.start + len(t.steps) for t in branches} == {3}
        assert entry["update/step_samples"] == sum(len(t.steps) for t in played)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branch_share": 1.0}, "branch_share is 1.0"),
        ({"branch_share": 0.1}, "it makes 0"),
        ({"branch_share": 0.75}, "it makes 3"),
        ({"branch_share": 0.5, "rollouts_ahead": 1}, "rollouts_ahead is 1"),
        ({"branch_share": 0.5, "refill_groups": 2}, "refill_groups is 2"),
        ({"branch_share": 0.5, "advantage_estimator": "grpo", "step_advantage_weight": 1.0}, "compares whole"),
        ({"branch_share": 0.5, "value_lambda": "auto"}, "value_lambda is 'auto'"),
    ],
)
def test_what_is_refused(make_trainer, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**options)


def wandering(seed):
    """An actor that takes random actions of those listed, and searches where it is asked to write."""
    draws = random.Random(seed)

    def act(live):
        steps = []
        for episode in live:
            action = draws.choice(episode.observation.admissible_actions or ["look"])
            if action.startswith("search["):
                action = f"search[{draws.choice(('red shirt', 'blue lamp', 'wooden table'))}]"
            steps.append(episode.step(action, None))
        return steps

    return ScriptedActor(act)


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["alfworld", "webshop"])
def test_real_environments_are_returned_to(environment, tmp_path):
    """200 branches: every observation and list of actions up to their node is the parent's, to the letter."""
    if environment == "alfworld":
        from g2po_envs.alfworld import AlfworldEnvironment, Manifest, generate_games

        generate_games(tmp_path, "train", 10, seed=0, size="tiny")
        manifest = Manifest.scan(tmp_path)
        factory, rows = partial(AlfworldEnvironment, manifest), manifest.rows()
    else:
        from test_webshop_environment import SOURCE

        from g2po_envs.webshop import WebshopEnvironment

        factory, rows = partial(WebshopEnvironment, SOURCE), SOURCE.rows("train")[:10]
    tasks, draws = [row for row in rows for _ in range(20)], random.Random(1)
    with EnvironmentPool(factory, num_workers=2) as pool:
        player = Player(pool, wandering(0), 15)
        parents, _ = player.play(tasks)
        long = [(task, parent) for task, parent in zip(tasks, parents) if len(parent.steps) > 1]
        chosen = [draws.choice(long) for _ in range(200)]
        branches = [Branch(0, parent.steps[: draws.randint(2, len(parent.steps))]) for _, parent in chosen]
        found, stats = Player(pool, wandering(2), 15).play([task for task, _ in chosen], branches=branches)
    assert not [t.error for t in found if t.error] and stats.replayed_steps > 200
    for branch, (_, parent), trajectory in zip(branches, chosen, found):
        point = parent.steps[trajectory.start]
        first = trajectory.steps[0] if trajectory.steps else None
        assert first is None or (first.observation, first.state_key) == (point.observation, point.state_key)
        assert trajectory.start == len(branch.steps) - 1
