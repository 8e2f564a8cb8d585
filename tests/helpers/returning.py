"""An episode by a list of actions, played again in other processes: what tests of environments ask for."""

from scripted_actors import ScriptedActor

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.check.play import replay_difference
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.rollout.player import Player

NEIGHBOURS = 3  # episodes in one worker
LIMITS = PoolLimits(1, 600, 300)


def played(factory, task, actions, max_turns=None, number=1):

    def act(live):
        return [episode.step(actions[episode.turns], None) for episode in live]

    with EnvironmentPool(factory, LIMITS) as pool:
        player = Player(pool, ScriptedActor(act), EpisodeLimits(max_turns or len(actions)))
        found, _ = player.play([task] * number, groups=[0] * number)
    return found


def difference(factory, task, episode):
    """What is different if another process plays the episode's actions."""
    with EnvironmentPool(factory, LIMITS) as pool:
        return replay_difference(pool, task, [episode])


def check_played_again(factory, task, actions, max_turns=None):
    """Neighbours in another process see, are paid and end as the episode alone did; return the episode."""
    (alone,) = played(factory, task, actions, max_turns)
    assert alone.error is None, alone.error
    assert played(factory, task, actions, max_turns, NEIGHBOURS) == [alone] * NEIGHBOURS
    assert difference(factory, task, alone) is None
    return alone
