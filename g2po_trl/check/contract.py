"""Play an environment in this process and list its contract violations, each with the line of the user's code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from ..environments.causes import inner
from ..environments.contract import Observation, TextEnvironment
from ..environments.failures import where_raised
from ..environments.tasks import check_task_columns
from ..environments.validation import EnvironmentContractError, factory_name, validate_observation, validate_step
from ..utils.show import show
from .findings import Finding, Kind

IMPOSSIBLE = ("\x00 no such action", "", "行动 ход 🚪", "go\nto", "look " * 2000)


def mutated_actions(admissible_actions: Sequence[str]) -> list[str]:
    """Return impossible actions and near misses of admissible ones, as a language model writes them."""
    kinds: dict[str, str] = {}
    for action in admissible_actions:
        kinds.setdefault(action.partition(" ")[0], action)
    near = []
    for action in list(kinds.values())[:6]:
        words = action.split(" ")
        near += [" ".join([*words[:-1], "xyzzy"]), f"{action} xyzzy", f" {action}\n"]
        near += [" ".join(words[:-1])] if len(words) > 1 else []
    return [*IMPOSSIBLE, *dict.fromkeys(near)]


def check_environment(
    environment_factory: Callable[[], TextEnvironment],
    task: dict[str, Any],
    actions: Sequence[str] | None = None,
    max_steps: int = 20,
) -> None:
    """Play an environment in this process and raise if it violates its contract.

    Args:
        environment_factory: as passed to the trainer.
        task: one dataset row: keyword arguments of `reset`.
        actions: actions to play. Default: random admissible actions.
        max_steps: maximum number of random steps.

    Raises:
        EnvironmentContractError: for the first violation; the message says how to correct it.
        ValueError: if `task` does not fit the arguments of `reset`.
    """
    check_task_columns(environment_factory, task)
    for finding in contract_findings(environment_factory, task, actions, max_steps):
        if finding.level == "error":
            raise EnvironmentContractError(f"{finding.text}. {finding.remedy}".removesuffix(". "))


def contract_findings(
    environment_factory: Callable[[], TextEnvironment],
    task: dict[str, Any],
    actions: Sequence[str] | None = None,
    max_steps: int = 20,
) -> list[Finding]:
    """Play an environment in this process and return each contract violation once, and warnings.

    If several actions raise in one line of code, the first is named. The arguments are those of `check_environment`.
    """
    name = factory_name(environment_factory)
    try:
        environment = environment_factory()
    except Exception as error:
        return [Finding.error(Kind.CONSTRUCTION, name=name, error=_short(error), where=where_raised(error))]
    missing = [method for method in ("reset", "step", "close") if not callable(getattr(environment, method, None))]
    if missing:
        return [Finding.error(Kind.METHODS, name=name, methods=missing)]
    try:
        return _Probe(name, environment, task).play(actions, max_steps)
    finally:
        environment.close()


class _Probe:
    """An environment under test, and its distinct violations by what makes them equal."""

    def __init__(self, name: str, environment: TextEnvironment, task: dict[str, Any]):
        self.name, self.environment, self.task = name, environment, task
        self.findings: dict[str, Finding] = {}

    def play(self, actions: Sequence[str] | None, max_steps: int) -> list[Finding]:
        first, again = self._reset(), self._reset()
        if first is None or again is None:
            return list(self.findings.values())
        if first != again:
            texts = {"first": show(first.text), "then": show(again.text)}
            self.findings["start"] = Finding.error(Kind.RANDOM_RESET, name=self.name, **texts)
        for action in mutated_actions(first.admissible_actions or ()):
            if self._step(action) is None:
                self._reset()
        self._step_through(actions, max_steps)
        if not any(finding.level == "error" for finding in self.findings.values()):
            self._compare_actions(first.admissible_actions or ())
        return list(self.findings.values())

    def _step_through(self, actions: Sequence[str] | None, max_steps: int) -> None:
        rng, observation = random.Random(0), self._reset()
        for number in range(max_steps if actions is None else len(actions)):
            if observation is None:
                if actions is not None or (observation := self._reset()) is None:
                    return
            action = rng.choice(observation.admissible_actions or ["look"]) if actions is None else actions[number]
            observation = self._step(action)

    def _compare_actions(self, admissible_actions: Sequence[str]) -> None:
        """Add a warning about listed actions that get the same response as an invalid action."""

        def respond(action: str) -> tuple[Any, ...]:
            self._reset()
            result = validate_step(self.environment.step(action), f"{self.name}.step")
            return result.observation.text, result.observation.images, result.reward, result.terminated

        invalid = respond("xyzzy plugh") if admissible_actions else None
        if refused := [action for action in admissible_actions if respond(action) == invalid]:
            facts = {"count": len(refused), "listed": len(admissible_actions), "response": invalid[0][:60]}
            shown = [*map(repr, refused[:3]), *["…"] * (len(refused) > 3)]
            self.findings["refused"] = Finding.warning(Kind.NO_EFFECT, **facts, actions=shown)

    def _reset(self) -> Observation | None:
        try:
            return validate_observation(self.environment.reset(**deepcopy(self.task)), f"{self.name}.reset")
        except Exception as error:
            self._add(error, Kind.RAISED_IN_RESET)
            return None

    def _step(self, action: str) -> Observation | None:
        """Return the next observation; `None` after an error, and at the end of an episode."""
        try:
            result = validate_step(self.environment.step(action), f"{self.name}.step")
        except Exception as error:
            self._add(error, Kind.RAISED_IN_STEP, action=show(action))
            return None
        return None if result.terminated or result.truncated else result.observation

    def _add(self, error: Exception, kind: Kind, **facts: Any) -> None:
        if isinstance(error, EnvironmentContractError):
            text = " ".join(str(error).split())
            self.findings.setdefault(text, Finding.error(Kind.VIOLATION, error=text))
            return
        where = where_raised(error)
        same = f"{', '.join(type(part).__name__ for part in inner(error))}{where}"
        if isinstance(error, ConnectionError):  # of a server: no task is to blame, and the message has the remedy
            same, kind = "ConnectionError", Kind.CONNECTION
        facts |= {"name": self.name, "error": _short(error), "where": where}
        self.findings.setdefault(same, Finding.error(kind, **facts))


def _short(error: BaseException) -> str:
    text = "; ".join(f"{type(part).__name__}: {' '.join(str(part).split())}" for part in inner(error))
    return text if len(text) <= 300 else f"{text[:297]}..."
