"""The loop: each episode as soon as its observation is there, or all together, on every rank as often."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from refusals import refused
from scripted_actors import TEMPLATE, WITH_ACTIONS, ScriptedEngine, ScriptedStream
from toy_environments import Countdown, Dying, Overwhelming, Waiting

from g2po_trl import EnvironmentPool, EpisodeLimits, Player, PoolLimits
from g2po_trl.engines.base import Completion
from g2po_trl.rollout.actor import PromptActor


def make_actor(encode, kind=ScriptedStream, watch=lambda prompt: None, **options):
    """Its completions follow from the prompts."""

    def answer(prompts):
        for prompt in prompts:
            watch(encode.tokenizer.decode(prompt))
        return [Completion(encode.tokenizer("go" * (1 + sum(prompt) % 3))["input_ids"]) for prompt in prompts]

    return PromptActor(kind(encode.tokenizer, answer, **options), encode, TEMPLATE)


def play_watched(pool, actor, tasks, groups=None):
    """Return what is played, its statistics, the numbers of episodes as they end, and each turn's state."""
    ended, progress = [], []
    watch = {"on_turn": lambda *state: progress.append(state), "on_end": lambda episode: ended.append(episode.number)}
    return *Player(pool, actor, EpisodeLimits(4)).play(tasks, groups=groups, **watch), ended, progress


@pytest.mark.parametrize("turns", [(1, 3, 2, 9, 4), (2,), (1, 1), ()])
def test_the_same_episodes_as_in_turns(encode, turns):
    tasks, groups = [{"turns": n} for n in turns], [number // 2 for number in range(len(turns))]
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        wanted, cost = Player(pool, make_actor(encode, ScriptedEngine), EpisodeLimits(4)).play(tasks, groups=groups)
        for order in range(3):
            found, stats, ended, progress = play_watched(pool, make_actor(encode, order=order), tasks, groups)
            assert found == wanted
            for name in ("turns", "num_steps", "generated_tokens"):
                assert getattr(stats, name) == getattr(cost, name)
            assert sorted(ended) == list(range(len(turns)))
            assert not progress or progress[-1] == (min(4, max(turns)), 0)


class Ranks:
    """Ranks that are threads: what is collective waits until all have called it."""

    def __init__(self, number):
        self.barrier, self.flags = threading.Barrier(number, timeout=30), [False] * number

    def any_running(self, rank, running):
        self.flags[rank] = running
        self.barrier.wait()
        any_running = any(self.flags)
        self.barrier.wait()
        return any_running

    def play(self, play):
        """`play(rank)` of each rank, at a time."""
        with ThreadPoolExecutor(len(self.flags)) as threads:
            return list(threads.map(play, range(len(self.flags))))


class CollectiveEngine(ScriptedEngine):
    """Its calls hold a collective operation, as those of sharded models."""

    is_collective = True

    def __init__(self, tokenizer, answer, barrier):
        super().__init__(tokenizer, answer)
        self.barrier, self.calls = barrier, []

    def generate(self, prompts, sampling, seeds=None):
        self.calls.append(len(prompts))
        self.barrier.wait()
        return super().generate(prompts, sampling, seeds) if prompts else []


@pytest.mark.parametrize(
    ("turns", "calls"),
    [
        (([1, 1], [3, 9]), ([2, 0, 0, 0], [2, 2, 2, 1])),
        (([2], []), ([1, 1], [0, 0])),
        (([1, 3], [3, 1], [2]), ([2, 1, 1], [2, 1, 1], [1, 1, 0])),
        (([], []), ([], [])),
    ],
)
def test_ranks_that_generate_together_call_as_often(encode, turns, calls):
    """Also with nothing left to ask; and each plays what it would alone."""
    ranks = Ranks(len(turns))
    actors = [make_actor(encode, CollectiveEngine, barrier=ranks.barrier) for _ in turns]

    def play(rank):
        tasks = [{"turns": n} for n in turns[rank]]
        with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
            player = Player(pool, actors[rank], EpisodeLimits(4), any_running=partial(ranks.any_running, rank))
            found, stats = player.play(tasks)
            alone, cost = Player(pool, make_actor(encode, ScriptedEngine), EpisodeLimits(4)).play(tasks)
        assert (found, stats.num_steps, stats.prompt_tokens) == (alone, cost.num_steps, cost.prompt_tokens)

    ranks.play(play)
    assert tuple(actor.engine.calls for actor in actors) == calls


def test_a_prompt_that_cannot_fit_on_one_rank_leaves_the_others_calls_equal(encode):
    """Rank 0's only episode ends at its first prompt."""
    ranks, tasks = Ranks(2), ([{"actions": 100}], [{"actions": 1}])
    actors = [make_actor(encode, CollectiveEngine, barrier=ranks.barrier) for _ in tasks]

    def play(rank):
        actors[rank].template, actors[rank].max_prompt_length = WITH_ACTIONS, 150
        with EnvironmentPool(Overwhelming, PoolLimits(1)) as pool:
            player = Player(pool, actors[rank], EpisodeLimits(2), any_running=partial(ranks.any_running, rank))
            return [(t.outcome, len(t.steps)) for t in player.play(tasks[rank])[0]]

    assert ranks.play(play)[0] == [("failure", 0)]
    assert len(actors[0].engine.calls) == len(actors[1].engine.calls) > 0
    assert not any(actors[0].engine.calls)


def test_seeds_follow_from_the_episode_and_its_turn(encode):
    """Those that are given, or that are drawn once a rollout: not from who is asked first."""
    tasks, seeds = [{"turns": n} for n in (3, 5)], []
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        for order in (1, 2):
            actor = make_actor(encode, order=order)
            player = Player(pool, actor, EpisodeLimits(4))
            player.play(tasks, seeds=[7, 8])
            for short in ({"seeds": [7]}, {"groups": [0]}):
                with refused(next(iter(short))):
                    player.play(tasks, **short)
            seeds.append(actor.engine.seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == len(seeds[0])


def test_a_fast_episode_does_not_wait_for_a_slow_one(encode, tmp_path):
    """A step of the slow one ends when the fast one is asked for its action of that turn."""

    asked = []

    def watch(prompt):
        if "|1" in prompt:
            asked.append(prompt)
            (tmp_path / f"asked-1-{len(asked)}").touch()

    with EnvironmentPool(partial(Waiting, tmp_path), PoolLimits(2)) as pool:
        trajectories, *_ = play_watched(pool, make_actor(encode, watch=watch), [{"number": 0}, {"number": 1}])
    assert [(t.outcome, len(t.steps)) for t in trajectories] == [("failure", 3)] * 2


def test_a_worker_that_dies_costs_one_episode(encode):
    tasks = [{"turns": 3, "reward": 13.0 if i == 2 else 10.0} for i in range(8)]
    with EnvironmentPool(Dying, PoolLimits(2)) as pool:
        trajectories, _, ended, _ = play_watched(pool, make_actor(encode), tasks, [0, 0, 0, 0, 1, 1, 1, 1])
    assert [t.outcome for t in trajectories] == ["error" if i == 2 else "success" for i in range(8)]
    assert "SIGKILL" in trajectories[2].error and len(ended) == 8


def test_an_engine_that_fails_leaves_environments_for_the_next_rollout(encode):
    with EnvironmentPool(Countdown, PoolLimits(2)) as pool:
        broken = make_actor(encode, watch=lambda prompt: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Player(pool, broken, EpisodeLimits(4)).play([{"turns": 3}] * 4)
        trajectories, _ = Player(pool, make_actor(encode), EpisodeLimits(4)).play([{"turns": 2}] * 3)
    assert [t.outcome for t in trajectories] == ["success"] * 3
