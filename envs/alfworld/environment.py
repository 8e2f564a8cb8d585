"""ALFWorld as a `TextEnvironment`: household tasks in text, played by the real TextWorld engine.

State keys follow the paper's released code: the observation and the list of admissible actions (what is carried shows
through that list). Two quirks of it are kept, and mean this here:

1. "Nothing happens." is no state of its own: an action that failed keeps the key of the state it was tried in, so it
   is a self-loop of the graph.
2. After "You heat/cool/clean … " and "You turn on …" the key joins this observation with the one before. These
   sentences do not say where in the plan they were heard; the one before does.

Keys do not depend on `hidden_actions` or `intro`: how a state is shown does not change which state it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from g2po_envs.alfworld import engine
from g2po_envs.alfworld.manifest import Manifest, game_id
from g2po_trl.environment import Observation, StepResult, TextEnvironment

_CHANGES = ("You heat", "You cool", "You clean", "You turn on")


class AlfworldEnvironment(TextEnvironment):
    """Plays the games of a manifest.

    Args:
        manifest: the games; `reset(task_id=…)` plays one of them.
        hidden_actions: first words of actions left out of the admissible list. They can be played all the same.
            `("help", "look", "inventory", "examine")` leaves what is needed to win.
        success_reward: paid when the task is done; everything else pays 0.
        intro: the first observation is the engine's whole welcome, task included, as in the paper; else it is the
            description of the room alone (the task is in `Observation.task` either way).
    """

    def __init__(
        self,
        manifest: Manifest,
        hidden_actions: Sequence[str] = ("help",),
        success_reward: float = 10.0,
        intro: bool = True,
    ):
        if isinstance(hidden_actions, str):
            raise TypeError("hidden_actions must be a sequence of words, not one string")
        self.manifest = manifest
        self.hidden_actions = frozenset(hidden_actions)
        self.success_reward = success_reward
        self.intro = intro
        self._session: engine.Session | None = None

    def reset(self, task_id: str, **ignored_columns) -> Observation:
        """Start the game with this id. Cheap for a game that this process played before."""
        path = self.manifest.path(task_id)
        try:
            game = engine.GAMES.get(task_id, lambda: self._read(task_id, path))
        except engine.CorruptGameError:
            raise
        except (Exception, SystemExit) as error:  # the translator exits on some PDDL it cannot read
            raise engine.CorruptGameError(f"{path}: the engine cannot load this game ({error!r})") from error
        self._session = engine.Session(game)
        text = self._session.reset()
        self._task, self._key, self._previous = game.task, "", text
        return self._observe(text if self.intro else _room(text), self._make_key(text))

    def step(self, action: str) -> StepResult:
        """Play an action; one that cannot be done here is answered with "Nothing happens."."""
        if self._session is None:
            raise RuntimeError("call reset before step")
        text = self._session.step(action)
        if text == engine.NOTHING_HAPPENS:
            key = self._key
        elif text.startswith(_CHANGES):
            key = self._make_key(f"{self._previous}\n{text}")
        else:
            key = self._make_key(text)
        self._previous = text
        won = self._session.won
        return StepResult(
            self._observe(text, key),
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

    def _make_key(self, text: str) -> str:
        return "\n".join((text, *self._session.admissible))

    def _observe(self, text: str, key: str) -> Observation:
        self._key = key
        shown = [a for a in self._session.admissible if a.split(" ", 1)[0] not in self.hidden_actions]
        return Observation(text, key, shown, self._task)


def _room(intro: str) -> str:
    """The engine's welcome without its title and without the task."""
    return intro.split("\n\n", 1)[-1].rsplit("\n\nYour task is to:", 1)[0]
