"""Demonstrations on training games: actions of an expert, in states that a careless agent reaches.

A walkthrough shows one good path, and a model that has seen only good paths fails one step away from them. So a
*careless walker* plays each game (it follows the expert most of the time, looks in wrong places, undoes its own work),
and the expert's action is recorded in every state that the walker reaches.

The expert needs no planner. A scout first walks through the whole room and records where everything is; later changes
follow from the walker's own actions. While searching, the expert goes to the object's true place: over many games,
this amounts to a search over the remaining possible places, the best that a reader of the prompt can do.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl.environments.contract import TextEnvironment
from g2po_trl.prompts.template import last_steps
from g2po_trl.utils.errors import G2POError

TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_ADJECTIVES = {"clean": "clean", "hot": "heat", "cool": "cool"}
_TASKS = (  # the sentences of alfworld.gen.goal_library
    re.compile(r"(?:look at|examine) (?:the )?(?P<object>\w+) (?:under|with) the (?P<lamp>\w+)"),
    re.compile(r"(?P<two>put two) (?P<object>\w+) (?:in|on) (?P<place>\w+)"),
    re.compile(r"(?P<two>find two) (?P<object>\w+) and put them (?:in|on) (?P<place>\w+)"),
    re.compile(r"put a (?P<adjective>clean|hot|cool) (?P<object>\w+) (?:in|on) (?P<place>\w+)"),
    re.compile(r"(?P<verb>clean|heat|cool) some (?P<object>\w+) and put it (?:in|on) (?P<place>\w+)"),
    re.compile(r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<place>\w+)"),
)


@dataclass(frozen=True)
class Goal:
    """The goal in a task's sentence. `verb`: the change that the object needs before it is put down."""

    kind: str
    place: str | None = None
    lamp: str | None = None
    verb: str | None = None
    two: bool = False

    @classmethod
    def from_task(cls, task: str) -> Goal:
        for pattern in _TASKS:
            if match := pattern.search(task):
                found = match.groupdict()
                verb = found.get("verb") or _ADJECTIVES.get(found.get("adjective"))
                return cls(found["object"], found.get("place"), found.get("lamp"), verb, bool(found.get("two")))
        raise G2POError(f"task is {task!r}: not the sentence of a known task type", "task", task)


def _kind(name: str) -> str:
    return name.rsplit(" ", 1)[0]


@dataclass
class House:
    """Positions of all objects, updated by the actions played."""

    receptacles: list[str]
    place_of: dict[str, str]
    closed: set[str]
    here: str | None = None
    held: str | None = None
    done: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def scout(cls, environment: TextEnvironment, task: dict[str, Any]) -> House:
        """Visit and open every place of the room, and record its content."""
        start = environment.reset(**task)
        receptacles = [a.removeprefix("go to ") for a in start.admissible_actions if a.startswith("go to ")]
        house = cls(receptacles, {}, set())
        for place in receptacles:
            seen = environment.step(f"go to {place}").observation
            if f"open {place}" in seen.admissible_actions:
                house.closed.add(place)
                seen = environment.step(f"open {place}").observation
            _, _, things = seen.text.partition("you see ")
            house.place_of.update((thing, place) for thing in re.findall(r"\ban? (\w+ \d+)", things))
        return house

    def apply(self, action: str) -> None:
        """Update the house after an admissible action."""
        verb, *rest = action.split(" ")
        first, second = " ".join(rest[:2]), " ".join(rest[3:])
        if verb == "go":
            self.here = " ".join(rest[1:])
        elif verb == "open":
            self.closed.discard(first)
        elif verb == "close":
            self.closed.add(first)
        elif verb == "take":
            self.held = first
            self.place_of.pop(first)
        elif verb == "move":
            self.held = None
            self.place_of[first] = second
        elif verb in TOOLS:
            done = self.done.setdefault(first, set())
            done.add(verb)
            done.discard({"heat": "cool", "cool": "heat"}.get(verb))


class Expert:
    """Expert that returns an action towards the goal in any state. `rng` breaks ties."""

    def __init__(self, goal: Goal, rng: random.Random):
        self.goal, self.rng = goal, rng

    def act(self, house: House, actions: Sequence[str]) -> str:
        if house.held is None:
            return self._with_empty_hands(house, actions)
        if _kind(house.held) != self.goal.kind:
            return self._put_down(house, actions)
        return self._with_the_object(house, actions)

    def _ready(self, house: House, name: str) -> bool:
        return self.goal.verb is None or self.goal.verb in house.done.get(name, ())

    def _with_the_object(self, house: House, actions: Sequence[str]) -> str:
        held, goal = house.held, self.goal
        if goal.lamp:
            lamps = sorted(name for name in house.place_of if _kind(name) == goal.lamp)
            return self._at(
                house, actions, {house.place_of[name] for name in lamps}, [f"use {name}" for name in lamps]
            )
        if not self._ready(house, held):
            tools = [place for place in house.receptacles if _kind(place) == TOOLS[goal.verb]]
            return self._at(house, actions, set(tools), [f"{goal.verb} {held} with {tool}" for tool in tools])
        targets = {place for place in house.receptacles if _kind(place) == goal.place}
        # Of two objects the second goes where the first one is.
        targets = {p for o, p in house.place_of.items() if p in targets and _kind(o) == goal.kind} or targets
        return self._at(house, actions, targets, [f"move {held} to {place}" for place in sorted(targets)])

    def _put_down(self, house: House, actions: Sequence[str]) -> str:
        here = [a for a in actions if a.startswith(f"move {house.held} to ")]
        return here[0] if here else self._open_or_leave(actions)

    def _with_empty_hands(self, house: House, actions: Sequence[str]) -> str:
        if house.here in house.closed and f"open {house.here}" in actions:  # one cannot know what is inside
            return f"open {house.here}"
        wanted = {name: place for name, place in house.place_of.items() if _kind(name) == self.goal.kind}
        if self.goal.two:  # one of two that already lies where it should stays there
            for name in sorted(name for name, place in wanted.items() if _kind(place) == self.goal.place)[:1]:
                del wanted[name]
        takes = [f"take {name} from {place}" for name, place in sorted(wanted.items()) if place == house.here]
        return self._at(house, actions, set(wanted.values()), takes)

    def _at(self, house: House, actions: Sequence[str], places: set[str], doings: Sequence[str]) -> str:
        """Return one of `doings` if admissible, else open the closed place here, else go to one of `places`."""
        possible = [action for action in doings if action in actions]
        if possible:
            return possible[0]
        if house.here in places and f"open {house.here}" in actions:
            return f"open {house.here}"
        ways = [f"go to {place}" for place in sorted(places) if f"go to {place}" in actions]
        return self.rng.choice(ways) if ways else self._open_or_leave(actions)

    def _open_or_leave(self, actions: Sequence[str]) -> str:
        for verb in ("open ", "go to "):
            if some := [action for action in actions if action.startswith(verb)]:
                return self.rng.choice(some)
        return self.rng.choice(actions)


class LimitedExpert(Expert):
    """An expert without knowledge of tools and lamps, which acts at random where they are needed.

    It finds the object and takes it. Then, in tasks that need a tool or a lamp, it goes to a random place or does
    anything that is possible with the object here. Once the object is changed as required, it knows where to put it.

    A random choice of the expert stays random at any temperature. Label noise, in contrast, disappears at temperatures
    below 1. So reinforcement learning has to discover the actions that this expert does not show.
    """

    def _with_the_object(self, house: House, actions: Sequence[str]) -> str:
        if not self.goal.lamp and self._ready(house, house.held):
            return super()._with_the_object(house, actions)
        at_goal = house.here is not None and _kind(house.here) == self.goal.place
        kinds = [[a for a in actions if a.startswith("go ")]]
        kinds += [[a for a in actions if a.split(" ")[0] in (*TOOLS, "use", "open")]]
        kinds += [[a for a in actions if a.startswith("move ") and at_goal]]
        return self.rng.choice(self.rng.choice([kind for kind in kinds if kind]))


def demonstrate(
    environment: TextEnvironment,
    tasks: Iterable[dict[str, Any]],
    episodes: int,
    seed: int,
    max_turns: int = 20,
    history_length: int = 2,
    expert_class: type[Expert] = Expert,
    carelessness: Sequence[float] = (0.1, 0.3, 0.5),
    impossible: float = 0.0,
) -> list[Demonstration]:
    """Return every state that a careless walker visits in each task, with the expert's action.

    Args:
        environment: plays the tasks.
        tasks: arguments of `reset`.
        episodes: episodes per task.
        seed: seed of the walker.
        max_turns: turns per episode.
        history_length: past steps of a demonstration.
        expert_class: the expert.
        carelessness: shares of turns in which the walker ignores the expert; each episode draws one.
        impossible: share of turns with an inapplicable action, so that states after "Nothing happens." are included.
    """
    shown = []
    for number, task in enumerate(tasks):
        scouted = House.scout(environment, task)
        for episode in range(episodes):
            rng = random.Random(f"{seed}-{number}-{episode}")
            house = House(scouted.receptacles, dict(scouted.place_of), set(scouted.closed))
            walk = _Walk(environment, task, house, rng, expert_class, rng.choice(carelessness), impossible)
            shown += walk.demonstrations(max_turns, history_length)
    return shown


@dataclass
class _Walk:
    """An episode of the careless walker."""

    environment: TextEnvironment
    task: dict[str, Any]
    house: House
    rng: random.Random
    expert_class: type[Expert]
    carelessness: float
    impossible: float

    def demonstrations(self, max_turns: int, history_length: int) -> list[Demonstration]:
        house, rng = self.house, self.rng
        now = self.environment.reset(**self.task)
        text = now.task
        goal = Goal.from_task(text)
        expert = self.expert_class(goal, rng)
        shown, history = [], []
        for turn in range(max_turns):
            actions = now.admissible_actions
            best = expert.act(house, actions)
            shown.append(Demonstration(text, now.text, list(actions), last_steps(history, history_length), turn, best))
            if self.impossible and rng.random() < self.impossible:
                action = _impossible(house, goal, rng)
            else:
                action = _careless(actions, rng) if rng.random() < self.carelessness else best
            result = self.environment.step(action)
            if action in actions:
                house.apply(action)
            history.append((now.text, action))
            now = result.observation
            if result.terminated or result.truncated:
                break
        return shown


def _careless(actions: Sequence[str], rng: random.Random) -> str:
    """Return a random action, often a move to another place."""
    ways = [action for action in actions if action.startswith("go to ")]
    return rng.choice(ways if ways and rng.random() < 0.5 else actions)


def _impossible(house: House, goal: Goal, rng: random.Random) -> str:
    """Return an action of a model that ignores the prompt: the task's words with arbitrary numbers."""
    number, here = rng.randint(1, 3), house.here or house.receptacles[0]
    return rng.choice(
        (
            f"take {goal.kind} {number} from {here}",
            f"go to {_kind(rng.choice(house.receptacles))} {rng.randint(2, 5)}",
            f"move {house.held or f'{goal.kind} 1'} to {goal.place or here} {number}",
        )
    )
