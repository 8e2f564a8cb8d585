"""Groups that go on from one rollout to the next: nothing is lost, and nothing gets too old."""

import random
import signal
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import build_tokenizer
from datasets import Dataset
from letter_environment import LongLetterEnvironment
from scripted_actors import ScriptedEngine, ScriptedStream, make_actor
from toy_environments import Countdown, Dying, Slow

from g2po_trl import EnvironmentPool, G2POError, PoolLimits, read_jsonl
from g2po_trl.engines.sampling import Sampling
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.experimental.partial_rollouts import PartialRollouts, UnfinishedGroup, _name_of, next_batch
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.strategy import RolloutContext


@pytest.fixture(scope="module")
def encode():
    return ChatEncoder(build_tokenizer())


def numbers(groups):
    return None if groups is None else [group.number for group in groups]


def test_the_first_complete_groups_make_a_batch():
    groups = [UnfinishedGroup(number, version=3) for number in range(6)]
    assert next_batch(groups, 2, 3, 1) is None
    for place, number in enumerate((4, 1, 5)):
        groups[number].completed = place
    assert numbers(next_batch(groups, 2, 3, 1)) == [1, 4]
    assert next_batch(groups[1:2], 2, 3, 1) is None


def test_a_group_that_would_get_too_old_comes_first():
    """At version 4, those that were opened at 3 are due with one version ahead; with two, as many as one batch cannot
    take at version 5."""
    groups = [UnfinishedGroup(number, version=3 if number < 2 else 4) for number in range(4)]
    for place, number in enumerate((2, 3, 1)):
        groups[number].completed = place
    assert next_batch(groups, 2, 4, 1) is None
    groups[0].completed = 3
    assert numbers(next_batch(groups, 2, 4, 1)) == [0, 1]
    groups = [UnfinishedGroup(number, version=3 if number < 3 else 4) for number in range(6)]
    for place, number in enumerate((4, 5)):
        groups[number].completed = place
    assert next_batch(groups, 2, 4, 2) is None, "two of the three can wait for version 5, one cannot"
    groups[1].completed = 2
    assert numbers(next_batch(groups, 2, 4, 2)) == [1, 4]


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_group_is_ever_too_old_and_none_is_left_out(ahead):
    draws = random.Random(ahead)
    for _ in range(30):
        size, opened, groups, places, trained = draws.randint(1, 5), 0, [], iter(range(10**9)), []
        for version in range(1, 30):
            batch = None
            while batch is None:
                while len(groups) < (1 + ahead) * size and draws.random() < 0.8:
                    groups.append(UnfinishedGroup(opened, version))
                    opened += 1
                played = [group for group in groups if group.completed is None]
                if played:
                    # Often the newest: an old one is overtaken as long as that is allowed.
                    draws.choice(played[-2:]).completed = next(places)
                batch = next_batch(groups, size, version, ahead)
            assert len(batch) == size and all(version - group.version <= ahead for group in batch)
            trained += numbers(batch)
            groups = [group for group in groups if group not in batch]
        assert sorted(trained + numbers(groups)) == list(range(opened))


def test_choosing_a_batch_does_not_compare_each_group_with_each():
    """It is done each time that something has come: with 1,024 groups in a batch, it took 2 s."""
    compared = []

    class Number(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int(self) == other

    groups = [UnfinishedGroup(Number(number), version=3 if number < 100 else 4) for number in range(200)]
    for place, group in enumerate(reversed(groups)):
        group.completed = place
    assert numbers(next_batch(groups, 100, 4, 1)) == list(range(100)) and len(compared) <= 300


def make_rolling(player, group_size, ahead, tasks, **context):
    context = RolloutContext(player, group_size, tasks, sampling=Sampling(max_completion_length=8), **context)
    return PartialRollouts(context, max_off_policy_steps=ahead)


def collect(rolling, rows, version):
    rollout = rolling.collect(rows, range(len(rows)), version)
    return rollout.trajectories, rollout.stats


def roll(pool, actor, tasks, iterations, ahead=1, group_size=3, size=2, max_turns=4, streams=True):
    """(trajectories, stats) of each rollout; the strategy itself."""
    rolling = make_rolling(Player(pool, actor, EpisodeLimits(max_turns), streams=streams), group_size, ahead, tasks)
    order, rollouts = iter(range(10**6)), []
    for version in range(1, iterations + 1):
        rows = [dict(tasks[next(order) % len(tasks)]) for _ in range(size)]
        rows = [row for row in rows for _ in range(group_size)]
        rollouts.append(collect(rolling, rows, version))
    return rollouts, rolling


@pytest.mark.parametrize(
    ("kind", "streams"), [(ScriptedStream, True), (ScriptedStream, False), (ScriptedEngine, True)]
)
@pytest.mark.parametrize("ahead", [1, 2])
def test_rollouts_in_a_row(encode, kind, streams, ahead):
    """Whole groups of one task, episodes as long as their tasks, no more at a time than there are places."""
    tasks = [{"task_id": str(n), "turns": n} for n in (1, 2, 3, 9, 4, 2, 1)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        most, begin = [], pool.begin

        def watched(*arguments):
            slots = begin(*arguments)
            most.append(len(pool.episodes))
            return slots

        pool.begin = watched
        rollouts, rolling = roll(pool, make_actor(encode, kind), tasks, 8, ahead, streams=streams)
        assert max(most) <= 6 and not set(rolling._seeds) - set(rolling._group_of)
        open_tasks = [group.task["task_id"] for group in rolling.groups] + [t["task_id"] for t in rolling.queue]
        assert len(open_tasks) == ahead * 2
    taught = Counter()
    for version, (trajectories, stats) in enumerate(rollouts, 1):
        assert len(trajectories) == 6
        for group in (trajectories[:3], trajectories[3:]):
            assert len({t.task_id for t in group}) == 1
            taught[group[0].task_id] += 1
        for played in trajectories:
            turns = int(played.task_id)
            assert len(played.steps) == min(turns, 4) and played.outcome == ("truncated" if turns > 4 else "success")
            versions = [step.policy_version for step in played.steps]
            assert versions == sorted(versions) and version - ahead <= versions[0] and versions[-1] <= version
        assert 0 <= stats.active_fraction <= 1
    # Each was queued as often as its turn came, and once more for every task that was drawn at the beginning.
    assert sum(taught.values()) == 16


def test_no_group_is_opened_that_nobody_would_train_on(encode):
    tasks = [{"task_id": str(n), "turns": n} for n in (1, 3)]
    rows = [task for task in tasks for _ in range(3)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        left, player = iter((3, 2, 1)), Player(pool, make_actor(encode, ScriptedStream), EpisodeLimits(4))
        rolling = make_rolling(player, 3, 1, tasks, batches_left=lambda: next(left))
        played = [collect(rolling, rows, number)[0] for number in (1, 2, 3)]
        assert not rolling.groups and [len(batch) for batch in played] == [6, 6, 6]


def test_some_steps_are_by_an_older_policy(encode):
    tasks = [{"task_id": str(n), "turns": n} for n in (1, 4)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        rollouts, _ = roll(pool, make_actor(encode), tasks, 6)
    ages = [v - s.policy_version for v, (played, _) in enumerate(rollouts, 1) for t in played for s in t.steps]
    assert set(ages) == {0, 1}


def test_others_play_in_between(encode):
    """A panel in the same pool, while environments of open groups are at work."""
    tasks = [{"task_id": str(n), "turns": n} for n in (1, 4)]
    for kind in (ScriptedStream, ScriptedEngine):
        with EnvironmentPool(partial(Slow, 0.02), PoolLimits(2)) as pool:
            actor = make_actor(encode, kind)
            rollouts, rolling = roll(pool, actor, tasks, 3)
            running = len(rolling._loop.running)
            panel, _ = rolling.player.play([{"turns": 2}] * 5)
            assert [t.outcome for t in panel] == ["success"] * 5
            left = len(rolling._loop.running)
            assert left <= running and bool(left) == bool(running), "they rest"
            rows = [{"task_id": "2", "turns": 2}] * 6
            trajectories, _ = collect(rolling, rows, 4)
            assert [t.outcome for t in trajectories] == ["success"] * 6


def test_places_are_filled_before_the_engine_is_asked(encode):
    """An engine that is asked once a turn is asked about the episodes that follow those that have ended, too."""
    tasks = [{"task_id": str(n), "turns": n} for n in (2, 3, 4, 5)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        actor, asked = make_actor(encode, ScriptedEngine), []
        answer = actor.engine.answer
        actor.engine.answer = lambda prompts: asked.append(len(prompts)) or answer(prompts)
        rollouts, _ = roll(pool, actor, tasks, 8, max_turns=10)
    assert sum(stats.num_steps for _, stats in rollouts) == sum(asked) and np.mean(asked) > 5.8


def test_ctrl_c_while_environments_come_to_rest(encode):
    """The pool has ended all episodes then: nobody waits for them."""
    tasks = [{"task_id": str(n), "turns": n} for n in (2, 3, 4)]
    with EnvironmentPool(partial(Slow, 0.2), PoolLimits(2)) as pool:
        rollouts, rolling = roll(pool, make_actor(encode), tasks, 1)
        assert pool.pending
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                rolling.player.play([{"turns": 1}])
        finally:
            signal.signal(signal.SIGALRM, before)
        assert not rolling.groups and len(rolling.queue) == 2
        (played,), _ = rolling.player.play([{"turns": 1}])
        assert played.outcome == "success"


def test_a_pool_that_somebody_else_has_emptied(encode):
    """An error and a new start, instead of episodes that nobody plays any more."""
    tasks = [{"task_id": str(n), "turns": n} for n in (2, 7, 3)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        _, rolling = roll(pool, make_actor(encode, ScriptedEngine), tasks, 1, max_turns=9)
        assert rolling._loop.running
        pool.end()
        rows = [{"task_id": "2", "turns": 2}] * 6
        with pytest.raises((RuntimeError, ValueError), match="ended"):
            collect(rolling, rows, 3)
        trajectories, _ = collect(rolling, rows, 3)
        assert len(trajectories) == 6 and not {t.outcome for t in trajectories} & {"error", "lost"}


def test_rows_that_share_a_task_id(encode):
    tasks = [{"task_id": "a", "turns": n} for n in (1, 2)]
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        first, second = (
            make_rolling(Player(pool, make_actor(encode), EpisodeLimits(4)), 3, 1, tasks) for _ in range(2)
        )
        first.queue.extend(tasks)
        second.load_state_dict(first.state_dict())
    assert list(second.queue) == tasks


def test_tasks_that_the_dataset_has_lost_are_named_on_every_rank(encode):
    kept, lost, of_rank_1 = ({"task_id": name, "turns": 2} for name in "abc")
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        player = Player(pool, make_actor(encode), EpisodeLimits(4))
        rolling = make_rolling(player, 3, 1, [kept, of_rank_1], gather=lambda own: own * 2)
        state = [[_name_of(kept)], [_name_of(lost), _name_of(of_rank_1)]]
        with pytest.raises(ValueError, match=rf"hashes of the rows: {_name_of(lost)}\): use the run's dataset"):
            rolling.load_state_dict(state)
        assert not rolling.queue


def test_a_resumed_run_has_other_seeds(encode):
    """It numbers its groups from 0 again."""
    task, seeds = {"task_id": "a", "turns": 1}, []
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        for version in (1, 7):
            rolling = make_rolling(Player(pool, make_actor(encode), EpisodeLimits(4)), 3, 1, [task])
            rolling._begin_group(task, version)
            seeds += rolling._seeds.values()
    assert len(set(seeds)) == 6


def test_environments_that_die(encode):
    """Their episodes are errors, of groups that are trained on like others."""
    tasks = [{"task_id": str(n), "turns": 3, "reward": 13.0 if n == 2 else 10.0} for n in range(4)]
    with EnvironmentPool(Dying, PoolLimits(2)) as pool:
        rollouts, _ = roll(pool, make_actor(encode), tasks, 6)
    outcomes = Counter((t.task_id == "2", t.outcome) for played, _ in rollouts for t in played)
    assert set(outcomes) == {(True, "error"), (False, "success")} and sum(outcomes.values()) == 36


def test_tasks_that_are_set_aside_are_not_played(encode):
    tasks = [{"task_id": str(n), "turns": 2} for n in range(3)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        player = Player(pool, make_actor(encode, ScriptedEngine), EpisodeLimits(4), excluded=["1"])
        rolling = make_rolling(player, 3, 1, tasks)
        trajectories, _ = collect(rolling, [tasks[1]] * 3 + [tasks[0]] * 3, 1)
    assert len(trajectories) == 6 and "1" in {t.task_id for t in trajectories}
    found = {(t.task_id == "1", t.outcome, len(t.steps)) for t in trajectories}
    assert found <= {(True, "error", 0), (False, "success", 2)}


def test_after_an_error_open_tasks_come_first(encode):
    tasks = [{"task_id": str(n), "turns": 2} for n in range(4)]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        actor = make_actor(encode)
        answer, actor.engine.answer = actor.engine.answer, lambda prompts: 1 / 0
        rolling = make_rolling(Player(pool, actor, EpisodeLimits(4)), 3, 1, tasks)
        with pytest.raises(ZeroDivisionError):
            collect(rolling, [tasks[3]] * 3 + [tasks[1]] * 3, 1)
        (waiting,) = rolling.state_dict()
        assert not pool.episodes and len(waiting) == 4
        assert [task["task_id"] for task in rolling.queue][:2] == ["3", "1"]
        actor.engine.answer = answer
        for rank, number in ((0, 1), (1, 2)):  # of as many processes as before, or more
            gather = lambda own, number=number: own * number  # noqa: E731
            other = make_rolling(Player(pool, actor, EpisodeLimits(4)), 3, 1, tasks, rank=rank, gather=gather)
            other.load_state_dict([waiting])
            assert list(other.queue) == list(rolling.queue)[rank::number]


def test_log_probabilities_of_generate(tiny_model_dir):
    """Those of the tokens that it sampled, at its temperature."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from g2po_trl.engines.transformers import TransformersEngine

    model, tokenizer = (kind.from_pretrained(tiny_model_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    engine = TransformersEngine.from_model(model, tokenizer, logprobs=True, batch_tokens=60)
    prompts = [tokenizer("go " * n)["input_ids"] for n in (1, 5, 3)]
    torch.manual_seed(0)
    sampling = Sampling(temperature=0.7, max_completion_length=6)
    for prompt, completion in zip(prompts, engine.generate(prompts, sampling)):
        logits = model(torch.tensor([[*prompt, *completion.ids]])).logits[0, len(prompt) - 1 : -1] / 0.7
        wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, wanted.tolist(), atol=1e-5)
    (greedy,) = engine.generate(prompts[:1], Sampling(temperature=0, max_completion_length=3))
    assert greedy.logprobs is None


def test_training(make_trainer, tmp_path):
    """With a learning rate of 0 an older policy is the same one, so nothing is corrected."""
    trainer = make_trainer(rollout_strategy="partial_rollouts", max_steps=5, learning_rate=0.0, save_trajectories=True)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    assert len(entries) == 5 and entries[0]["rollout/max_age"] == 0
    assert all(entry["rollout/episodes"] == 8 for entry in entries)
    assert max(entry["rollout/max_age"] for entry in entries) <= 1
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in entries) < 1e-4
    assert min(entry["sampling/effective_sample_size"] for entry in entries) == pytest.approx(1, abs=1e-6)
    files = sorted((tmp_path / "out" / "trajectories").glob("train-*.jsonl"))
    assert len(files) == 5 and all(len({t.task_id for t in list(read_jsonl(f))[:4]}) == 1 for f in files)


def test_a_policy_that_moves_on_is_corrected(make_trainer):
    trainer = make_trainer(
        LongLetterEnvironment,
        rollout_strategy="partial_rollouts",
        rollout_strategy_kwargs={"max_off_policy_steps": 2},
        max_steps=8,
        learning_rate=1e-2,
        vllm_importance_sampling_clip_max=1.5,
        steps_per_generation=2,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "episode/success_rate" in entry]
    aged = [entry for entry in entries if entry["rollout/mean_age"] > 0]
    assert aged and all(entry["sampling/importance_sampling_ratio/max"] <= 1.5 for entry in entries)
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in aged) > 1e-3
    assert min(entry["sampling/effective_sample_size"] for entry in aged) < 1


def test_partial_rollouts_refuse_an_engine_that_generates_for_several_ranks(encode):
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        actor = make_actor(encode, ScriptedEngine)
        actor.engine.is_collective = True
        with pytest.raises(ValueError, match="generates for several processes together"):
            make_rolling(Player(pool, actor, EpisodeLimits(4)), 3, 1, [])


def test_partial_rollouts_refuse_parts_of_groups():
    """With several processes, which have whole groups together."""
    args = SimpleNamespace(rollout_strategy="partial_rollouts", per_device_train_batch_size=4, steps_per_generation=1)
    args.num_generations = 3
    with pytest.raises(G2POError, match="rollout_strategy"):
        PartialRollouts.check(args)


def test_resuming(make_trainer, tmp_path):
    """What was open is played again, before all other tasks."""
    tasks = Dataset.from_list([{"turns": 1 + n % 4, "task_id": str(n)} for n in range(8)])
    options = {"environment": Countdown, "dataset": tasks, "rollout_strategy": "partial_rollouts"}
    options |= {"save_strategy": "steps", "save_steps": 2}
    first = make_trainer(**options, max_steps=2)
    first.train()
    (waiting,) = first.strategy.state_dict()
    assert len(waiting) == 2
    second = make_trainer(**options, max_steps=4)
    restored = []
    restore = second.strategy.load_state_dict

    def watched(state):
        restore(state)
        restored.extend(dict(task) for task in second.strategy.queue)

    second.strategy.load_state_dict = watched
    second.train(resume_from_checkpoint="latest")
    assert [_name_of(task) for task in restored] == waiting and second.state.global_step == 4
