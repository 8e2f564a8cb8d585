"""Episodes that continue others: the same states to the letter, the turns that are left, and what is counted."""

import json
import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import programs
import pytest
from conftest import build_tokenizer
from datasets import Dataset
from letter_trainer import make_config
from returning import StartAt
from scripted_actors import ScriptedActor, ScriptedEngine, ScriptedStream
from toy_environments import Countdown, Dying, Forgetful, Gated, Slow, Uneven

from g2po_trl import EnvironmentPool, PoolLimits, PromptTemplate, Step, Trajectory, read_jsonl
from g2po_trl.engines.base import Completion
from g2po_trl.experimental.branching.branching import BranchingRollout, BranchSchedule
from g2po_trl.prompts.template import parse_plain
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.episode import NOT_REPLAYED, Branch
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.strategy import RolloutContext

TEMPLATE = PromptTemplate(
    "{task}|{observation}", "{steps_taken}|{history}|{observation}", parse_completion=parse_plain
)
ENGINES = [ScriptedEngine, ScriptedStream]


@pytest.fixture(scope="module")
def encode():
    return ChatEncoder(build_tokenizer())


def make_player(pool, encode, kind, max_turns=6, watch=None):
    def answer(prompts):
        for prompt in prompts if watch else ():
            watch(encode.tokenizer.decode(prompt))
        return [Completion(encode.tokenizer("go")["input_ids"]) for _ in prompts]

    return Player(pool, PromptActor(kind(encode.tokenizer, answer), encode, TEMPLATE), max_turns)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_branch_goes_on_where_its_parent_was(encode, kind):
    """Its observations, prompts and turns are the parent's from there on; it ends when the parent's time would."""
    asked = []
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        player = make_player(pool, encode, kind, max_turns=6, watch=asked.append)
        tasks = [{"turns": 4, "reward": 3.0}, {"turns": 9}]
        (short, long), _ = player.play(tasks)
        prompts, asked[:] = sorted(asked), []
        branches = [Branch(0, short.steps[:3]), Branch(1, long.steps[:5]), None, Branch(0, short.steps[:2])]
        found, stats = player.play(
            [tasks[0], tasks[1], tasks[0], tasks[0]], groups=[0, 0, 0, 0], schedule=StartAt(branches)
        )
    assert [(t.parent, t.start, len(t.steps), t.outcome) for t in found] == [
        (0, 2, 2, "success"),
        (1, 4, 2, "truncated"),
        (None, 0, 4, "success"),
        (0, 1, 3, "success"),
    ]
    assert found[0].steps == short.steps[2:] and found[3].steps == short.steps[1:]
    assert found[1].steps == long.steps[4:], "six turns in all"
    assert stats.replayed_steps == 2 + 4 + 1 and stats.turns == 4 and stats.num_steps == 2 + 2 + 4 + 3
    assert set(asked) <= set(prompts) and found[0].reward == 3.0


@pytest.mark.parametrize("kind", ENGINES)
def test_an_environment_that_nobody_can_return_to(encode, kind):
    with EnvironmentPool(Forgetful, PoolLimits(2)) as pool:
        player = make_player(pool, encode, kind)
        (parent,), _ = player.play([{"turns": 4}])
        found, _ = player.play([{"turns": 4}] * 3, schedule=StartAt([Branch(0, parent.steps[:n]) for n in (2, 3, 4)]))
    assert [t.outcome for t in found] == ["success", "success", "error"]
    assert found[2].error.startswith(f"{NOT_REPLAYED}: before step 4, the observation is 'left 1 ")
    assert not found[2].steps


@pytest.mark.parametrize("kind", ENGINES)
def test_a_process_that_ends_says_nothing_about_returning(encode, kind):
    """The task may be branched again; what became of the environment is said as in any other episode."""
    with EnvironmentPool(Dying, PoolLimits(1)) as pool:
        player = make_player(pool, encode, kind)
        (parent,), _ = player.play([{"turns": 4}])
        (found,), _ = player.play([{"turns": 4, "reward": 13.0}], schedule=StartAt([Branch(0, parent.steps[:3])]))
    assert parent.outcome == "success" and found.outcome == "error" and not found.steps
    assert found.error.startswith("crash: ") and NOT_REPLAYED not in found.error


def test_a_parent_that_was_longer_than_the_episode(encode):
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        player = make_player(pool, encode, ScriptedEngine)
        (parent,), _ = player.play([{"turns": 5}])
        for step in parent.steps:
            step.observation = step.observation.replace("5", "2").replace("4", "1")
            step.state_key = step.state_key.replace("5", "2").replace("4", "1")
        (found,), _ = player.play([{"turns": 2}], schedule=StartAt([Branch(0, parent.steps[:4])]))
        (other,), _ = player.play([{"turns": 3, "task_id": "x"}], schedule=StartAt([Branch(0, parent.steps[:2])]))
    assert found.outcome == "error" and "parent's went on" in found.error
    assert other.outcome == "error" and "the observation is 'left 3', and was 'left 2'" in other.error


def make_strategy(rule, player=None, **context):
    """Half of each group of four is held back; the rule is given the first episodes in place of their graph."""
    context = RolloutContext(player, 4, graph_of=lambda groups: groups[0], **context)
    strategy = BranchingRollout(context, branch_share=0.5)
    strategy.rule = rule
    return strategy


def failed_group():
    return [Trajectory("x", [Step(name, "go") for name in "abc"], 0.0, "failure") for _ in range(2)]


def test_branches_begin_where_the_rule_says():
    seen, group = [], failed_group()
    strategy = make_strategy(lambda graph, budget: seen.append((graph, budget)) or [(1, 1)])
    assert [(branch.parent, branch.steps) for branch in strategy.branches(group)] == [(1, group[1].steps[:2])]
    assert seen == [(group, 2)] and strategy.counted_per_group == 2


def test_a_task_that_cannot_be_returned_to_is_not_branched_again(caplog):
    strategy = make_strategy(lambda graph, budget: [(0, 1)])
    assert len(strategy.branches(failed_group())) == 1
    strategy.record_failures([Trajectory("x", [], 0.0, "error", error=f"{NOT_REPLAYED}: whatever")])
    assert strategy.branches(failed_group()) == []
    (told,) = caplog.messages
    assert told.startswith("task x is not branched again") and told.endswith(f"{NOT_REPLAYED}: whatever")
    again = make_strategy(strategy.rule)
    again.load_state_dict(strategy.state_dict())
    assert again.no_return == {"x"}


@pytest.mark.parametrize("point", [(0, 0), (0, 3), (5, 1), (-1, 1)])
def test_a_rule_that_names_a_state_that_is_not_there_is_refused(point):
    strategy = make_strategy(lambda graph, budget: [point])
    with pytest.raises(ValueError, match=f"rule returned trajectory {point[0]}, position {point[1]}: name traj"):
        strategy.branches(failed_group())


def test_a_rule_that_returns_too_many_branches_is_refused():
    with pytest.raises(ValueError, match="at most 2 of a group"):
        make_strategy(lambda graph, budget: [(0, 1)] * 3).branches(failed_group())


@pytest.mark.parametrize("chosen", [None, [3], [(1, 1.0)], [(1, 1, 1)], "ab"])
def test_a_rule_that_returns_something_else_is_refused(chosen):
    with pytest.raises(ValueError, match=r"rule returned .*: return pairs of whole numbers"):
        make_strategy(lambda graph, budget: chosen).branches(failed_group())


def test_numbers_of_numpy_do_not_get_into_files():
    (branch,) = make_strategy(lambda graph, budget: np.array([[1, 2]])).branches(failed_group())
    assert type(branch.parent) is int and branch.parent == 1


def test_checkpoints_know_of_all_ranks():
    strategy = make_strategy(None, gather=lambda own: [*own, "a", "b"])
    strategy.no_return = {"b"}
    assert strategy.state_dict() == ["a", "b"]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_group_branches_when_its_first_episodes_have_ended(encode, kind):
    """Long before those of another group have. Its number is an episode's place."""
    tasks = [{"turns": 2, "reward": 0.0, "task_id": "a"}] * 4 + [{"turns": 12, "task_id": "b"}] * 4
    strategy = make_strategy(lambda first, budget: [(0, 1)] if first[0].task_id == "a" else [])
    ended = []
    with EnvironmentPool(partial(Slow, 0.01), PoolLimits(2)) as pool:
        player = make_player(pool, encode, kind, max_turns=20)
        groups = [0] * 4 + [1] * 4
        found, stats = player.play(tasks, groups=groups, on_end=ended.append, schedule=BranchSchedule(strategy))
    assert [(t.task_id, t.parent, t.start, len(t.steps), t.outcome) for t in found] == [
        *[("a", None, 0, 2, "failure")] * 2,
        ("a", 0, 1, 1, "failure"),
        ("a", None, 0, 2, "failure"),
        *[("b", None, 0, 12, "success")] * 4,
    ]
    assert stats.replayed_steps == 1 and stats.num_steps == 7 + 48 and len(ended) == 8
    assert {e.number for e in ended[:4]} == {0, 1, 2, 3}


@pytest.mark.parametrize("limit", [None, 120])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_branch_continues_its_parents_conversation(encode, kind, limit):
    """Its prompts are the parent's, token by token, also where the tokenizer would encode completions otherwise."""
    letters = [token for letter in "garden" for token in encode.tokenizer(letter)["input_ids"]]
    assert letters != encode.tokenizer("garden")["input_ids"]
    strategy = make_strategy(lambda first, budget: [(0, 2), (1, 6)])
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        engine = kind(encode.tokenizer, lambda prompts: [Completion(letters)] * len(prompts))
        actor = PromptActor(engine, encode, TEMPLATE, history="conversation", max_prompt_length=limit)
        found, stats = Player(pool, actor, 20).play(
            [{"turns": 9}] * 4, groups=[0] * 4, schedule=BranchSchedule(strategy)
        )
    parent = [step.prompt_ids for step in found[0].steps]
    assert [(t.parent, t.start, len(t.steps)) for t in found[2:]] == [(0, 2, 7), (1, 6, 3)]
    assert [step.prompt_ids for step in found[2].steps] == parent[2:]
    assert [step.prompt_ids for step in found[3].steps] == parent[6:]
    assert any(step.prompt_truncated for step in found[0].steps) == (limit is not None)
    if limit is None:
        assert stats.continued_prompts == stats.later_prompts == 8 + 8 + 7 + 3


@pytest.mark.parametrize("kind", ENGINES)
def test_the_active_fraction_counts_turns_in_which_held_back_episodes_wait(encode, kind):
    """Two groups: of four episodes, two play ten turns, and then the others; of the other group, four turns each."""
    tasks = [{"turns": 10, "task_id": "a"}] * 4 + [{"turns": 4, "task_id": "b"}] * 4
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        player = make_player(pool, encode, kind, max_turns=20)
        strategy = make_strategy(lambda first, budget: [], player)
        stats = strategy.collect(tasks, [0] * 4 + [1] * 4, 1).stats
    assert stats.parts == ((20, 8),) and stats.active_fraction == (4 * 10 + 4 * 4) / (20 * 8) and stats.turns == 10


def test_nobody_waits_while_a_branch_is_brought_back(encode, tmp_path):
    """No step is played again before others were asked ten more times."""
    tasks = [{"turns": 5, "reward": 0.0, "task_id": "a"}] * 4 + [{"turns": 60, "task_id": "b"}] * 4
    strategy = make_strategy(lambda first, budget: [(0, 4), (1, 4)] if first[0].task_id == "a" else [])
    ended, asked = [], []

    def end(episode):
        ended.extend([episode] if episode.task_id == "a" else [])
        if len(ended) == 2:
            (tmp_path / "ended").touch()

    def ask(prompt):
        asked.extend([prompt] if len(ended) >= 2 else [])
        if len(asked) == 10:
            (tmp_path / "asked").touch()

    with EnvironmentPool(partial(Gated, tmp_path), PoolLimits(3)) as pool:
        player = make_player(pool, encode, ScriptedStream, max_turns=60, watch=ask)
        found, stats = player.play(tasks, groups=[0] * 4 + [1] * 4, on_end=end, schedule=BranchSchedule(strategy))
    assert [(t.start, t.error) for t in found] == [(0, None), (0, None), (4, None), (4, None), *[(0, None)] * 4]
    assert stats.replayed_steps == 8


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_paid_on_the_way_is_compared(encode, kind):
    with EnvironmentPool(Uneven, PoolLimits(1)) as pool:
        player, task = make_player(pool, encode, kind), {"turns": 3, "random_rewards": True}
        (parent,), _ = player.play([task])
        found, _ = player.play([task] * 2, schedule=StartAt([None, Branch(0, parent.steps[:3])]))
    paid = parent.steps[0].reward
    assert found[0].error is None and found[1].outcome == "error" and not found[1].steps
    assert f"{NOT_REPLAYED}: 'go' paid 0." in found[1].error and f"its parent {paid:g}" in found[1].error


def test_rates_are_about_as_many_episodes_of_each_task(make_trainer):
    """Where a group has won, all of it begins at the beginning: half of the tasks are won, but two thirds of those."""
    tasks = [{"turns": 3, "reward": 10.0 * (n % 2), "task_id": str(n)} for n in range(8)]
    trainer = make_trainer(
        Countdown,
        dataset=Dataset.from_list(tasks),
        rollout_strategy="branching",
        max_steps=4,
        shuffle_dataset=False,
        learning_rate=0.0,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "rollout/episodes" in entry]
    assert len(entries) == 4
    for entry in entries:
        assert entry["episode/success_rate"] == 0.5 and entry["episode/episodes"] == 4
        assert (
            entry["rollout/episodes"] == 8 and entry["rollout/branches"] == 2 and entry["rollout/branch_errors"] == 0
        )
        assert entry["rollout/steps"] == entry["update/step_samples"] == 8 * 3 - entry["rollout/replayed_steps"] < 24
        assert entry["rollout/completion_tokens"] <= entry["rollout/steps"] * trainer.args.max_completion_length


def test_training(make_trainer, tmp_path):
    """Every episode fails, so half of each group continues others; they are trained, and no success rate has them."""
    tasks = Dataset.from_list([{"turns": 3, "reward": 0.0, "success": False, "task_id": str(n)} for n in range(8)])
    trainer = make_trainer(Countdown, dataset=tasks, rollout_strategy="branching", max_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    for number, entry in enumerate(entries, 1):
        assert entry["rollout/branches"] == 4 and entry["rollout/episodes"] == 8
        assert entry["episode/episodes"] == 4 and entry["rollout/replayed_steps"] > 0
        played = list(read_jsonl(tmp_path / "out" / "trajectories" / f"train-{number:06}.jsonl"))
        branches = [t for t in played if t.parent is not None]
        assert len(played) == 8 and len(branches) == 4 and {t.start + len(t.steps) for t in branches} == {3}
        assert entry["update/step_samples"] == sum(len(t.steps) for t in played)


def test_success_rates_are_those_of_the_first_episodes():
    """Branches that won and were long change nothing of `episode/*`."""
    from g2po_trl import StateGraph
    from g2po_trl.runs.metrics import rollout_metrics

    def episode(names, won, **origin):
        steps = [Step(name, "go") for name in names]
        return Trajectory("x", steps, 10.0 * won, "success" if won else "failure", info={"score": 0.5}, **origin)

    roots = [episode("abc", True), episode("abd", False), episode("ab", False)]
    branches = [episode("bcdefgh", True, parent=1, start=1), episode("d", True, parent=1, start=2)]

    def metrics(played, held_back):
        return rollout_metrics(played, StateGraph.from_groups([played]), len(played), len(played) - held_back)

    plain, branched = metrics(roots, 0), metrics([*roots, *branches], 2)
    names = [name for name in plain if name.startswith("episode/")]
    assert {name: branched[name] for name in names} == {name: plain[name] for name in names}
    assert plain["episode/success_rate"] == pytest.approx(1 / 3) and branched["graph/nodes"] > plain["graph/nodes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_strategy_kwargs": {"branch_share": 0.1}}, "may make 0"),
        ({"rollout_strategy_kwargs": {"branch_share": 0.75}}, "may make 3"),
        (
            {"rollout_strategy_kwargs": {"branch_share": float("nan")}},
            "branch_share=nan: set it to a number",
        ),
        (
            {"rollout_strategy_kwargs": {"branch_share": float("inf")}},
            "branch_share=inf: set it to a number",
        ),
        ({"rollout_strategy_kwargs": {"rule": "best"}}, "rule .* is 'best': choose one of least_visited"),
        ({"rollout_strategy_kwargs": {"branch_share": "0.5"}}, "branch_share='0.5': set it to a number"),
        (
            {"rollout_strategy_kwargs": {"share": 0.5}},
            "has 'share', which .* does not have; .*its options are branch_share, rule",
        ),
        ({"advantage_estimator": "grpo", "step_advantage_weight": 1.0}, "compares whole"),
        ({"step_advantage_weight": 0.0}, "step_advantage_weight=0.0 compares whole"),
        ({"estimator_kwargs": {"node_centric": False, "edge_centric": False}}, "whole episodes only"),
    ],
)
def test_branching_refuses_what_it_excludes(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, rollout_strategy="branching", **options)


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
        from g2po_envs.webshop import ShopSource, WebshopEnvironment

        source = ShopSource(products=60)

        factory, rows = partial(WebshopEnvironment, source), source.rows("train")[:10]
    tasks, draws = [row for row in rows for _ in range(20)], random.Random(1)
    with EnvironmentPool(factory, PoolLimits(2)) as pool:
        player = Player(pool, wandering(0), 15)
        parents, _ = player.play(tasks)
        long = [(task, parent) for task, parent in zip(tasks, parents) if len(parent.steps) > 1]
        chosen = [draws.choice(long) for _ in range(200)]
        branches = [Branch(0, parent.steps[: draws.randint(2, len(parent.steps))]) for _, parent in chosen]
        found, stats = Player(pool, wandering(2), 15).play([task for task, _ in chosen], schedule=StartAt(branches))
    assert not [t.error for t in found if t.error] and stats.replayed_steps > 200
    for branch, (_, parent), trajectory in zip(branches, chosen, found):
        point = parent.steps[trajectory.start]
        first = trajectory.steps[0] if trajectory.steps else None
        assert first is None or (first.observation, first.state_key) == (point.observation, point.state_key)
        assert trajectory.start == len(branch.steps) - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "fsdp2"])
def test_two_ranks(kind, tiny_model_dir, tmp_path):
    """The same weights, all counts over both, and what one rank cannot return to is kept for all."""
    script, env = (
        Path(__file__).parents[1] / "helpers" / "branches_script.py",
        {**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    given = {"per_device_train_batch_size": 8}
    arguments = [script, tiny_model_dir, tmp_path / "out", kind, json.dumps(given)]
    run = programs.run_ranks(2, *arguments, env={**env, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"weights"')]
    assert len(ranks) == 2 and [rank["known"] for rank in ranks] == [["7"]] * 2
    if kind == "none":
        assert ranks[0]["weights"] == ranks[1]["weights"]
    log, other = (rank["log"] for rank in ranks)
    assert [e["rollout/branches"] for e in log] == [e["rollout/branches"] for e in other]
    assert len(log) == 3 and sum(entry["rollout/branches"] for entry in log) > 0
    for number, entry in enumerate(log, 1):
        files = (tmp_path / "out" / "trajectories").glob(f"*-{number:06}-rank*.jsonl")
        played = [t for file in files for t in read_jsonl(file)]
        assert entry["rollout/episodes"] == len(played) >= 16 and entry["rollout/branch_errors"] == 0
        assert entry["rollout/branches"] == sum(t.parent is not None for t in played)
        assert entry["episode/episodes"] == len(played) / 2
        assert entry["rollout/replayed_steps"] == sum(t.start for t in played)
