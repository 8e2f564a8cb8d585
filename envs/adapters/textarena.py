"""TextArena's single-player games.

    environment_factory = partial(TextArenaEnvironment, "FrozenLake-v0")      # dataset rows: {"seed": 1}

TextArena shows a player the whole conversation. This adapter returns new messages only: the rules become the task,
which prompts repeat, and the trainer's `history_length` decides how many earlier steps a prompt shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import import_extra
from g2po_trl.utils.options import require

from .common import PrivateRandomState

_VARIANTS = ("-raw", "-train")  # the same game in other wrappers
STATE_KEYS = ("observation", "history")


class TextArenaEnvironment(TextEnvironment):
    """A single-player game of TextArena as a `TextEnvironment`.

    The reward comes at the end of the game: 1 for a solved game, in many games a fraction for progress. Only an
    episode with a reward of 1 or more is a success. Most games forgive one illegal move and end at the next, with the
    failure reason `invalid_move`.

    Args:
        env_id: passed to `textarena.make`; the variants "-train" and "-raw" are the same game here.
        make_options: keyword arguments of the game, in addition to those it is registered with.
        state_key: `"observation"`: the board, or the new text in games without one. `"history"`: all actions and
            answers so far, for games whose answers do not determine the state (Wordle, Mastermind, GuessTheNumber).
        actions: the admissible actions, if they are the same in all states of the game; prompts list them.

    Raises:
        ImportError: if textarena is not installed.
        G2POError: if there is no such game, or it needs word lists or a key that are missing.
    """

    def __init__(
        self,
        env_id: str,
        make_options: Mapping[str, Any] | None = None,
        state_key: str = "observation",
        actions: Sequence[str] | None = None,
    ):
        require(state_key in STATE_KEYS, "state_key", state_key, f"choose one of {', '.join(STATE_KEYS)}")
        self.textarena = import_extra("textarena")
        for variant in _VARIANTS:
            env_id = env_id.removesuffix(variant)
        self.env_id = env_id
        self.actions = None if actions is None else list(actions)
        self.keys_by_history = state_key == "history"
        self.randomness = PrivateRandomState()
        try:
            with self.randomness.active(0):
                self.game = self.textarena.make(f"{env_id}-raw", **(make_options or {}))
        except (LookupError, SyntaxError, ValueError) as error:  # word lists, a newer Python's syntax, no such game
            remedy = "choose another game, or get word lists by python -m nltk.downloader words "
            remedy += "averaged_perceptron_tagger_eng"
            raise G2POError(
                f"env_id is {env_id!r}, which TextArena cannot make ({error}): {remedy}", "env_id"
            ) from error

    def reset(self, seed: int | None = 0, task_id: Any = None, task_type: Any = None) -> Observation:
        """Start the game of a seed; `None` (a row without a seed) is 0.

        Raises:
            G2POError: if the game has several players.
        """
        seed = seed or 0
        with self.randomness.active(seed):
            try:
                self.game.reset(num_players=1, seed=seed)
                if not isinstance(self.game.state, self.textarena.SinglePlayerState):
                    raise ValueError("it has several players")
            except (AssertionError, ValueError, AttributeError) as error:
                remedy = "choose another one, or write a TextEnvironment whose step plays the other players"
                text = f"env_id is {self.env_id!r}, which is not a single-player game ({error}): {remedy}"
                raise G2POError(text, "env_id") from error
            rules, text, key = self._new_messages()
        text = text or "The game begins."  # some games show only their rules
        self._digest, self._steps = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8), 0
        return Observation(text, self._key(key), self.actions, task=rules)

    def step(self, action: str) -> StepResult:
        """Play a move, in square brackets as by TextArena's own wrapper. The game handles illegal moves."""
        if "[" not in action and "]" not in action:
            action = f"[{action}]"
        with self.randomness.active():
            done, _ = self.game.step(action)
            _, text, key = self._new_messages()
        self._digest.update(f"\0{action}\0{text}".encode("utf-8", "replace"))
        self._steps += 1
        key = self._key(key)
        if not done:
            return StepResult(Observation(text, key, self.actions))
        rewards, facts = self.game.close()
        reward, reason = rewards[0], facts[0].get("reason") or ""
        if isinstance(reward, str):  # some games swap reward and reason of an illegal move
            reward, reason = reason.removeprefix("Invalid Move: "), f"Invalid Move: {reward}"
        reward = float(reward)
        info = {"success": reward >= 1, "reason": reason}
        if facts[0]["invalid_move"]:
            info |= {"success": False, "failure_reason": f"invalid_move: {reason}"}
        return StepResult(Observation(f"{text}\n{reason}".strip(), key), reward, terminated=True, info=info)

    def _key(self, board: str | None) -> str | None:
        return f"{self._steps} steps {self._digest.hexdigest()}" if self.keys_by_history else board

    def _new_messages(self) -> tuple[str, str, str | None]:
        """Return the rules, all other messages since the last call, and the board."""
        kinds = self.textarena.ObservationType
        messages: dict[str, list[str]] = {"rules": [], "rest": [], "board": []}
        for _, message, kind in self.game.get_observation()[1]:
            if kind is kinds.PROMPT:
                messages["rules"].append(message)
            # Some games swap the fields of their echo, so that its kind is a text.
            elif isinstance(kind, kinds) and kind is not kinds.PLAYER_ACTION:
                messages["rest"].append(message)
                if kind is kinds.GAME_BOARD:
                    messages["board"].append(message)
        rules, rest, board = ("\n".join(texts).strip() for texts in messages.values())
        return rules, rest, board or None
