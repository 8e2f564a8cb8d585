"""A fixed policy in the tabular household, and what is exactly true of it: success, values, advantages, gradient.

The policy is a softmax over the admissible actions of each state. Its logits prefer actions that lead towards the
goal, by a strength that is chosen so that it wins a given share of the episodes; noise that depends on the place, the
thing in hand and the progress gives it habits. Its parameters, all 0, are added to the logits of all states that agree
in these three: an update changes what it does in many states at once, as an update of a language model does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.optimize import brentq

from benchmarks.credit.household import Household, softmax

_STRONGEST = 30.0


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy of S states and A actions, with C classes of states that share parameters.

    Args:
        house: S states.
        logits: (S, A).
        state_class: (S,) in 0 … C - 1.
        turns: an episode that has not won after so many is lost.
        slip: probability that an action has no effect.
    """

    house: Household
    logits: np.ndarray
    state_class: np.ndarray
    turns: int
    slip: float

    @property
    def num_classes(self) -> int:
        return int(self.state_class.max()) + 1

    @property
    def num_actions(self) -> int:
        return self.logits.shape[1]

    def probabilities(self) -> np.ndarray:
        """(S, A), 0 for what is not admissible."""
        return softmax(self.house, self.logits, np.arange(len(self.logits)))

    def moved(self, parameters: np.ndarray) -> Policy:
        """The policy with these parameters, (C, A), in place of zeros."""
        return replace(self, logits=self.logits + parameters[self.state_class])

    @classmethod
    def with_success(
        cls, house: Household, success: float, turns: int, slip: float, rng: np.random.Generator, noise: float = 1.0
    ) -> Policy:
        """A policy that wins exactly this share of its episodes.

        Raises:
            ValueError: if no strength of its preference for the goal gives this success.
        """
        features = [(place, where.index(-1) if -1 in where else None, done) for place, where, done in house.states]
        numbers: dict[tuple, int] = {}
        state_class = np.array([numbers.setdefault(feature, len(numbers)) for feature in features])
        habits = noise * rng.standard_normal((len(numbers), house.next_state.shape[1]))[state_class]
        distance = steps_to_go(house)
        left = np.where(house.wins, 0.0, distance[house.next_state])

        def of(strength: float) -> Policy:
            return cls(house, habits - strength * left, state_class, turns, slip)

        if not success_rate(of(0.0)) < success < success_rate(of(_STRONGEST)):
            raise ValueError(f"success is {success}: no policy of this house wins so often in {turns} turns")
        return of(brentq(lambda strength: success_rate(of(strength)) - success, 0.0, _STRONGEST, xtol=1e-10))


def steps_to_go(house: Household) -> np.ndarray:
    """(S,) fewest steps from each state to the goal; infinite distances become the largest finite one plus 1."""
    distance = np.where(house.wins.any(axis=1), 1.0, np.inf)
    while True:
        onward = np.where(house.admissible, distance[house.next_state], np.inf).min(axis=1) + 1
        closer = np.minimum(distance, onward)
        if np.array_equal(closer, distance):
            return np.minimum(distance, distance[np.isfinite(distance)].max() + 1)
        distance = closer


def transitions(policy: Policy) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Probabilities of the next state, (S, S) without episodes that have won, and of winning, (S,)."""
    house, probabilities = policy.house, policy.probabilities()
    states = np.arange(len(probabilities))
    effective = (1 - policy.slip) * probabilities
    onward = np.where(house.wins, 0.0, effective)
    rows, actions = np.nonzero(onward)
    matrix = sparse.coo_matrix((onward[rows, actions], (rows, house.next_state[rows, actions])), [len(states)] * 2)
    return (matrix + policy.slip * sparse.eye(len(states))).tocsr(), (effective * house.wins).sum(axis=1)


def success_rate(policy: Policy) -> float:
    """The probability that an episode wins."""
    onward, wins = transitions(policy)
    value = np.zeros(len(wins))
    for _ in range(policy.turns):
        value = wins + onward @ value
    return float(value[policy.house.start])


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact numbers of a policy; success is worth 1.

    Args:
        success: probability that an episode wins.
        values: (turns, S) probability of winning from a state with this turn to play.
        advantages: (turns, S, A) float32, Q - V of each action; meaningless where it is not admissible.
        gradient: (C, A) of the success with respect to the policy's parameters.
    """

    success: float
    values: np.ndarray
    advantages: np.ndarray
    gradient: np.ndarray

    @classmethod
    def from_policy(cls, policy: Policy) -> Truth:
        """By backward induction over the turns, and the probabilities of states forward."""
        house, probabilities = policy.house, policy.probabilities()
        onward, wins = transitions(policy)
        num_states, num_actions = probabilities.shape
        values = np.zeros((policy.turns + 1, num_states))
        advantages = np.empty((policy.turns, num_states, num_actions), dtype=np.float32)
        for turn in reversed(range(policy.turns)):
            after = values[turn + 1]
            values[turn] = wins + onward @ after
            worth = np.where(house.wins, 1.0, after[house.next_state])
            worth = (1 - policy.slip) * worth + policy.slip * after[:, None]
            advantages[turn] = worth - values[turn][:, None]
        reached = np.zeros(num_states)
        reached[house.start] = 1.0
        by_state = np.zeros_like(probabilities)
        for turn in range(policy.turns):
            by_state += reached[:, None] * probabilities * advantages[turn]
            reached = onward.T @ reached
        gradient = np.zeros((policy.num_classes, num_actions))
        np.add.at(gradient, policy.state_class, by_state)
        return cls(float(values[0, house.start]), values[:-1], advantages, gradient)
