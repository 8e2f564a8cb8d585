"""A household task without words: a finite decision process as tables, and a softmax policy over its states.

One of several objects must be taken, processed at the one place that can, and put where it belongs; the others are in
the way. Every place can be gone to, every object taken and put anywhere, looking around does nothing: an agent can
walk in circles. There is one reward, at the end. The state is all there is, so equal states are equal observations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

REWARD = 10.0


@dataclass(eq=False)
class Household:
    """Tables of S states and A actions.

    Args:
        states: (place, places of the objects with -1 for the hand, processed) of each state.
        next_state: (S, A). admissible: (S, A) bool. wins: (S, A) bool, the step that ends the task.
        start: the first state. shortest: steps of the shortest way from there.
    """

    states: list[tuple[int, tuple[int, ...], bool]]
    next_state: np.ndarray
    admissible: np.ndarray
    wins: np.ndarray
    start: int
    shortest: int

    @classmethod
    def random(cls, rng: np.random.Generator, places: int = 8, distractors: int = 3, idle: int = 1) -> Household:
        """A house with objects, station and goal at random places; enumerates the states that can be reached.

        Args:
            idle: actions that change nothing, such as looking around.
        """
        objects = distractors + 1  # object 0 is the one that matters; place -1 is the hand
        positions = tuple(int(p) for p in rng.integers(places, size=objects))
        station = int(rng.choice([p for p in range(places) if p != positions[0]]))
        goal = int(rng.choice([p for p in range(places) if p not in (station, positions[0])]))
        start = (int(rng.integers(places)), positions, False)
        number_of_actions = places + objects + 2 + idle  # go, take, put, process, look

        numbers, tables, queue = {start: 0}, [], deque([start])
        while queue:
            at, where, processed = queue.popleft()
            held = next((o for o in range(objects) if where[o] == -1), None)
            row = {places + objects + 2 + look: ((at, where, processed), False) for look in range(idle)}
            row |= {p: ((p, where, processed), False) for p in range(places) if p != at}
            if held is None:
                row |= {
                    places + o: ((at, _moved(where, o, -1), processed), False)
                    for o in range(objects)
                    if where[o] == at
                }
            else:
                won = held == 0 and processed and at == goal
                row[places + objects] = ((at, _moved(where, held, at), processed), won)
                if at == station:
                    row[places + objects + 1] = ((at, where, processed or held == 0), False)
            for state, _ in row.values():
                if state not in numbers:
                    numbers[state] = len(numbers)
                    queue.append(state)
            tables.append({action: (numbers[state], won) for action, (state, won) in row.items()})
        next_state = np.zeros((len(tables), number_of_actions), dtype=np.int64)
        admissible, wins = np.zeros_like(next_state, dtype=bool), np.zeros_like(next_state, dtype=bool)
        for number, row in enumerate(tables):
            for action, (following, won) in row.items():
                next_state[number, action], admissible[number, action], wins[number, action] = following, True, won
        return cls(list(numbers), next_state, admissible, wins, 0, _shortest(next_state, admissible, wins))


@dataclass
class Rollout:
    """Episodes side by side. `state`, `action`: (episodes, turns); `length`: steps of each; `won`: bool."""

    state: np.ndarray
    action: np.ndarray
    length: np.ndarray
    won: np.ndarray


def play(
    house: Household,
    logits: np.ndarray,
    episodes: int,
    turns: int,
    slip: float,
    rng: np.random.Generator,
    start: np.ndarray | None = None,
) -> Rollout:
    """Episodes of the softmax policy over admissible actions; with probability `slip` an action has no effect.

    `start`: (episodes,) states they begin in. `None`: all in the house's first.
    """
    state = np.full(episodes, house.start) if start is None else start
    states, actions = np.zeros((episodes, turns), dtype=np.int64), np.zeros((episodes, turns), dtype=np.int64)
    length, won = np.full(episodes, turns), np.zeros(episodes, dtype=bool)
    for turn in range(turns):
        cumulative = np.cumsum(softmax(house, logits, state), axis=1)
        action = (rng.random(episodes)[:, None] * cumulative[:, -1:] >= cumulative).sum(axis=1)
        effective = rng.random(episodes) >= slip
        states[:, turn], actions[:, turn] = state, action
        wins = house.wins[state, action] & effective & ~won
        length[wins], won = turn + 1, won | wins
        state = np.where(effective & ~won, house.next_state[state, action], state)
    return Rollout(states, actions, length, won)


def softmax(house: Household, logits: np.ndarray, states: np.ndarray) -> np.ndarray:
    """(len(states), A) probabilities, 0 for what is not admissible."""
    masked = np.where(house.admissible[states], logits[states], -np.inf)
    exponential = np.exp(masked - masked.max(axis=1, keepdims=True))
    return exponential / exponential.sum(axis=1, keepdims=True)


def _moved(where: tuple[int, ...], item: int, place: int) -> tuple[int, ...]:
    return where[:item] + (place,) + where[item + 1 :]


def _shortest(next_state: np.ndarray, admissible: np.ndarray, wins: np.ndarray) -> int:
    distance, queue = {0: 0}, deque([0])
    while queue:
        state = queue.popleft()
        if wins[state].any():
            return distance[state] + 1
        for following in next_state[state][admissible[state]]:
            if int(following) not in distance:
                distance[int(following)] = distance[state] + 1
                queue.append(int(following))
    raise ValueError("the task cannot be won")
