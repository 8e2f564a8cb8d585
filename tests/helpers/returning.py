"""An episode by a list of actions, played again in other processes: what tests of environments ask for."""

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.check.play import AnswerActor, replay_difference
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.rollout.player import Player

LIMITS = PoolLimits(1, 600, 300)


def played(factory, task, actions, max_turns=None, number=1):
    actor, limits = AnswerActor(lambda episode: actions[episode.turns]), EpisodeLimits(max_turns or len(actions))
    with EnvironmentPool(factory, LIMITS) as pool:
        return Player(pool, actor, limits).play([task] * number, groups=[0] * number)[0]


def difference(factory, task, episode):
    """What is different if another process plays the episode's actions."""
    with EnvironmentPool(factory, LIMITS) as pool:
        return replay_difference(pool, task, [episode])


def check_played_again(factory, task, actions, max_turns=None):
    """Three in another process see, are paid and end as the episode alone did; return the episode."""
    (alone,) = played(factory, task, actions, max_turns)
    assert alone.error is None, alone.error
    assert played(factory, task, actions, max_turns, 3) == [alone] * 3
    assert difference(factory, task, alone) is None
    return alone
