"""The household of `household.py` as text: ALFWorld's wording, names from ALFRED, an environment to play in.

Everything that a policy reads is a function of the state: the prompt shows neither past steps nor how many there were
(`HOUSE_PROMPT`, with `history_length` 0). A language model's policy in a house is then a table with a row for each
prompt, and what is true of it can be computed. With a history, the prompts would be as many as the paths.

An observation names the place and what lies there, as ALFWorld's does; what is held shows in the list of actions. What
ALFWorld leaves to the history comes first: whether the object that matters was cleaned, heated or cooled, and with
`sees_all` what lies elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from benchmarks.credit.household import REWARD, Household
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment

HOUSE_PROMPT = replace(ALFWORLD_COMPACT_PROMPT, later=ALFWORLD_COMPACT_PROMPT.first)
_STATIONS = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}


@dataclass(frozen=True, eq=False)
class TextHouse:
    """A house, and what its places and objects are called.

    Args:
        house: tables of S states and A actions. The last action changes nothing; it stands for every text that names
            no admissible action.
        places, objects: the name of each. Object 0 is the one that matters.
        verb: what is done to it at the station: "clean", "heat" or "cool".
        task: the goal in words.
        sees_all: the observation shows what lies elsewhere, and each state has a prompt of its own. Otherwise states
            that differ in that look the same: 320 prompts instead of 11,264, and objects must be searched for.
    """

    house: Household
    places: tuple[str, ...]
    objects: tuple[str, ...]
    verb: str
    task: str
    sees_all: bool = False

    @classmethod
    def random(cls, seed: int, places: int = 8, distractors: int = 2, sees_all: bool = False) -> TextHouse:
        """Return the house of this seed: 11,264 states with 8 places and 2 distractors."""
        from alfworld.gen.goal_library import gdict

        from g2po_envs.alfworld.vocabulary import HOLDS, OBJECT_TYPES, OPENABLE, PROPERTIES, ROOMS

        house = Household.random(np.random.default_rng([seed, 0]), places, distractors, idle=1)
        station, goal = _station_and_goal(house, places)
        rng = random.Random(f"house {seed}")
        verb = rng.choice(sorted(_STATIONS))
        furnishing = {kind for room in ROOMS.values() for kind in room} & set(HOLDS)
        furniture = sorted(furnishing - OPENABLE - set(_STATIONS.values()))
        things = {place: sorted(HOLDS[place] & set(OBJECT_TYPES)) for place in furniture}
        pairs = [
            (thing, place) for place in furniture for thing in things[place] if thing in PROPERTIES[f"{verb}able"]
        ]
        target, goal_type = rng.choice(pairs)
        kinds = rng.sample([kind for kind in furniture if kind != goal_type], places)
        kinds[station], kinds[goal] = _STATIONS[verb], goal_type
        others = sorted({thing for kind in kinds for thing in things.get(kind, ())} - {target})
        named = [target, *rng.sample(others, distractors)]
        sentence = rng.choice(gdict[f"pick_{verb}_then_place_in_recep"]["templates"])
        task = sentence.format(obj=target.lower(), recep=goal_type.lower())
        names = (tuple(f"{kind.lower()} 1" for kind in of) for of in (kinds, named))
        return cls(house, *names, verb, task, sees_all)

    @property
    def num_states(self) -> int:
        return len(self.house.states)

    @cached_property
    def station(self) -> int:
        """The place where object 0 is processed."""
        return _station_and_goal(self.house, len(self.places))[0]

    def actions(self, state: int) -> dict[str, int]:
        """Return the admissible actions in ALFWorld's words and order, each with its number."""
        at, where, _ = self.house.states[state]
        held = next((name for name, place in zip(self.objects, where) if place == -1), None)
        here = self.places[at]
        texts = [f"go to {place}" for place in self.places] + [f"take {name} from {here}" for name in self.objects]
        texts += [f"move {held} to {here}", f"{self.verb} {held} with {here}"]
        return {text: a for text, a in sorted(zip(texts, range(len(texts)))) if self.house.admissible[state, a]}

    def observation(self, state: int) -> Observation:
        """Return what the agent is given in a state. Its key is what it reads."""
        at, where, processed = self.house.states[state]
        elsewhere = sorted(set(where) - {at, -1}, key=self.places.__getitem__) if self.sees_all else []
        seen = [self._contents(place, where) for place in elsewhere]
        seen += [f"You {self.verb} the {self.objects[0]} using the {self.places[self.station]}."] * processed
        text = " ".join([*seen, f"You arrive at {self.places[at]}.", self._contents(at, where)])
        actions = list(self.actions(state))
        return Observation(text, "\n".join((text, *actions)), actions, self.task)

    def _contents(self, place: int, where: tuple[int, ...]) -> str:
        things = sorted(f"a {name}" for name, at in zip(self.objects, where) if at == place)
        listed = ", ".join([*things[:-1], f"and {things[-1]}"] if len(things) > 1 else things) or "nothing"
        name = self.places[place]
        if place == self.station and self.verb != "clean":
            return f"The {name} is open. In it, you see {listed}."
        return f"On the {name}, you see {listed}."


@lru_cache(128)
def text_house(seed: int, places: int = 8, distractors: int = 2, sees_all: bool = False) -> TextHouse:
    """Return `TextHouse.random` of these arguments, made once a process."""
    return TextHouse.random(seed, places, distractors, sees_all)


class HouseEnvironment(TextEnvironment):
    """Plays houses, each told by a row of their arguments: `house` (the seed), `places`, `distractors`, `sees_all`."""

    prompt_template = HOUSE_PROMPT

    def reset(
        self, house: int, places: int = 8, distractors: int = 2, sees_all: bool = False, **ignored
    ) -> Observation:
        """Start in the house's first state."""
        self.text = text_house(house, places, distractors, sees_all)
        self.state = self.text.house.start
        return self.text.observation(self.state)

    def step(self, action: str) -> StepResult:
        """Play one action; any other text than an admissible action changes nothing."""
        tables, number, won = self.text.house, self.text.actions(self.state).get(action), False
        if number is not None:
            won = bool(tables.wins[self.state, number])
            self.state = int(tables.next_state[self.state, number])
        seen = self.text.observation(self.state)
        return StepResult(seen, REWARD if won else 0.0, terminated=won, info={"success": won})


def _station_and_goal(house: Household, places: int) -> tuple[int, int]:
    """Read off the tables where an object is processed, and where it must be put."""
    process = places + len(house.states[0][1]) + 1
    station = house.states[int(np.argmax(house.admissible[:, process]))][0]
    return station, house.states[int(np.argmax(house.wins.any(axis=1)))][0]
