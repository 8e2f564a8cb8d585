"""An episode by a list of actions, and branches from each of its states: what tests of environments ask for."""

from scripted_actors import ScriptedActor

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.rollout.episode import Branch
from g2po_trl.rollout.player import Player


class StartAt:
    """A schedule: all episodes begin at once, each at its branch, or with its task for `None`."""

    def __init__(self, branches):
        self.branches = branches

    def first(self, episodes):
        for episode, branch in zip(episodes, self.branches, strict=True):
            episode.branch = branch
        return episodes

    def more(self):
        return []

    def ended(self, episode):
        pass


def return_everywhere(factory, task, actions, max_turns=None, at=None):
    """Play the actions, and in another process continue that episode from each of its later states, all at a time; or
    from those before the steps `at`, counted from 0.

    Returns:
        The episode, and its branches.
    """

    def act(live):
        return [episode.step(actions[episode.turns], None) for episode in live]

    def play(*arguments, **options):
        with EnvironmentPool(factory, PoolLimits(1, 600, 300)) as pool:
            return Player(pool, ScriptedActor(act), max_turns or len(actions)).play(*arguments, **options)

    (parent,), _ = play([task])
    assert parent.error is None, parent.error
    branches = [Branch(0, parent.steps[: number + 1]) for number in at or range(1, len(parent.steps))]
    found, stats = play([task] * len(branches), groups=[0] * len(branches), schedule=StartAt(branches))
    assert stats.replayed_steps <= sum(range(1, len(parent.steps)))
    return parent, found


def check_returned_everywhere(factory, task, actions, max_turns=None, at=None):
    """Each branch sees, pays and ends as the episode did from there on."""
    parent, found = return_everywhere(factory, task, actions, max_turns, at)
    assert len(found) == len(at or parent.steps[1:]) > 0
    for branch in found:
        assert (branch.error, branch.steps) == (None, parent.steps[branch.start :])
        assert (branch.reward, branch.outcome, branch.info) == (parent.reward, parent.outcome, parent.info)
        assert branch.final_observation == parent.final_observation
    return parent
