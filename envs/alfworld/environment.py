"""ALFWorld as a `TextEnvironment`: household tasks in text, played by the real TextWorld engine.

`key` chooses the state keys of the graph:

- `"released"`, the rule of the paper's released code: the observation and the list of admissible actions (which shows
  the carried object). After "You heat/cool/clean … " or "You turn on …", the next state's key also contains that
  sentence's own key, so the action is remembered for one state and then forgotten.
- `"memory"`: the observation and the list, and the past actions that no text shows any more: which objects were heated
  or cooled (the last of the two counts), cleaned, switched on.

With both, "Nothing happens." is not a state: the state key is unchanged after a failed action, which is a self-loop of
the graph. Keys do not depend on `hidden_actions` or `intro`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from g2po_envs.alfworld import engine
from g2po_envs.alfworld.manifest import Manifest, game_id
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.utils.options import require

KEYS = ("released", "memory")
_CHANGES = ("You heat", "You cool", "You clean", "You turn on")
_CHANGE = re.compile(r"You (heat|cool|clean|turn on) the (.+?)(?: using the .+)?\.")
_UNDONE_BY = {"heat": "cool", "cool": "heat"}


class AlfworldEnvironment(TextEnvironment):
    """Plays the games of a manifest.

    Args:
        manifest: the games; the `task_id` of `reset` is one of them.
        hidden_actions: first words of actions left out of the admissible list. They can still be played. `("help",
            "look", "inventory", "examine")` leaves the actions that are needed to solve a game.
        success_reward: reward when the task is done; all other steps return 0.
        intro: the first observation is the engine's whole introduction including the task, as in the paper. `False`:
            only the description of the room (the task is in `Observation.task` either way).
        key: "released" or "memory", see above.
    """

    def __init__(
        self,
        manifest: Manifest,
        hidden_actions: Sequence[str] = ("help",),
        success_reward: float = 10.0,
        intro: bool = True,
        key: str = "released",
    ):
        require(not isinstance(hidden_actions, str), "hidden_actions", hidden_actions, "pass a list of words")
        require(key in KEYS, "key", key, f"choose one of {', '.join(KEYS)}")
        self.manifest = manifest
        self.hidden_actions = frozenset(hidden_actions)
        self.success_reward = success_reward
        self.intro = intro
        self.key = key
        self._session: engine.Session | None = None

    def reset(self, task_id: str, **ignored_columns) -> Observation:
        """Start the game with this id; cheap for a cached game."""
        path = self.manifest.path(task_id)
        try:
            game = engine.GAMES.get(task_id, lambda: self._read(task_id, path))
        except engine.CorruptGameError:
            raise
        except (Exception, SystemExit) as error:  # the translator exits on some PDDL it cannot read
            raise engine.CorruptGameError(f"{path}: the engine cannot load this game ({error!r})") from error
        self._session = engine.Session(game)
        text = self._session.reset()
        self._task, self._last, self._done = game.task, "", set()
        self._enter(text)
        return self._observe(text if self.intro else _room(text))

    def step(self, action: str) -> StepResult:
        """Play an action; an inapplicable action returns "Nothing happens."."""
        if self._session is None:
            raise RuntimeError("call reset before step")
        text = self._session.step(action)
        if text != engine.NOTHING_HAPPENS:
            self._enter(text)
        won = self._session.won
        return StepResult(
            self._observe(text),
            reward=self.success_reward if won else 0.0,
            terminated=won,
            info={"success": won},
        )

    def close(self) -> None:
        self._session = None

    def _read(self, task_id: str, path: str) -> dict:
        game = engine.read_game(path)
        if game_id(game) != task_id:
            raise engine.CorruptGameError(f"{path}: changed since the manifest was made; scan the folder again")
        return game

    def _enter(self, text: str) -> None:
        """Update the state key after an observation."""
        state = "\n".join((text, *self._session.admissible))
        if self.key == "memory":
            if change := _CHANGE.match(text):
                verb, thing = change.groups()
                self._done.discard((thing, _UNDONE_BY.get(verb)))
                self._done.add((thing, verb))
            self._state_key = "\n".join((state, *(f"{thing}: {verb}" for thing, verb in sorted(self._done))))
        else:
            self._state_key = f"{self._last}\n{state}" if self._last.startswith(_CHANGES) else state
        self._last = state

    def _observe(self, text: str) -> Observation:
        shown = [a for a in self._session.admissible if a.split(" ", 1)[0] not in self.hidden_actions]
        return Observation(text, self._state_key, shown, self._task)


def _room(intro: str) -> str:
    """Return the engine's welcome without its title and without the task."""
    return intro.split("\n\n", 1)[-1].rsplit("\n\nYour task is to:", 1)[0]
