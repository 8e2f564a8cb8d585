"""Play an environment in this process and list its contract violations, each with the line of the user's code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from typing import Any

from ..environments.causes import in_words, where_raised
from ..environments.contract import Observation, TextEnvironment
from ..environments.tasks import check_task_columns
from ..environments.validation import (
    EnvironmentContractError,
    constructed,
    factory_name,
    validate_observation,
    validate_step,
)
from ..utils.show import different_parts, show
from .findings import Finding, Kind, has_errors

IMPOSSIBLE = ("\x00 no such action", "", "行动 ход 🚪", "go\nto", "look " * 2000)


def mutated_actions(admissible_actions: Sequence[str]) -> list[str]:
    """Return impossible actions and near misses of admissible ones, as a language model writes them."""
    near = []
    for action in admissible_actions[:8]:
        start, space, _ = action.rpartition(" ")
        near += [f"{start}{space}xyzzy", f"{action} xyzzy", f" {action}\n", start]
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
            raise EnvironmentContractError(finding.text, finding.facts.get("field") or finding.kind.name)


def contract_findings(
    factory: Callable, task: dict[str, Any], actions: Sequence[str] | None, max_steps: int
) -> list[Finding]:
    """Return warnings and violations; of several actions that raise in one line of the user's code, the first."""
    name = factory_name(factory)
    try:
        environment = constructed(factory, name)
    except Exception as error:
        return [_violation(error, Kind.CONSTRUCTION, name=name)]
    with closing(environment):
        return _Tested(name, environment, task).play(actions, max_steps)


def _violation(error: Exception, kind: Kind, **facts: Any) -> Finding:
    if isinstance(error, (EnvironmentContractError, ConnectionError)):  # whose messages have the remedy
        return Kind.REFUSED.found(error=" ".join(str(error).split()), field=getattr(error, "field", None))
    return kind.found(error=in_words(error)[:300], where=where_raised(error), **facts)


class _Tested:
    """An environment under test, and its distinct violations by what makes them equal."""

    def __init__(self, name: str, environment: TextEnvironment, task: dict[str, Any]):
        self.name, self.environment, self.task = name, environment, task
        self.findings: dict[str, Finding] = {}

    def play(self, actions: Sequence[str] | None, max_steps: int) -> list[Finding]:
        first, again = self._reset(), self._reset()
        if first is None or again is None:
            return list(self.findings.values())
        if first != again:
            texts = (first.text, again.text) if first.text != again.text else (repr(first), repr(again))
            before, then = different_parts(*texts)
            self.findings["start"] = Kind.RANDOM_RESET.found(name=self.name, first=before, then=then)
        listed, rng = first.admissible_actions or [], random.Random(0)
        for played in (mutated_actions(listed), [None] * max_steps if actions is None else actions):
            seen = self._reset()
            for action in played:
                if seen is None and (seen := self._reset()) is None:
                    break
                seen = self._step(rng.choice(seen.admissible_actions or ["look"]) if action is None else action)
        if listed and not has_errors(self.findings.values()):
            self._compare_actions(listed)
        return list(self.findings.values())

    def _compare_actions(self, listed: Sequence[str]) -> None:
        """Add a warning about listed actions that get the same response as an invalid action."""

        def respond(action: str) -> tuple[Any, ...]:
            self._reset()
            result = validate_step(self.environment.step(action), f"{self.name}.step")
            return result.observation.text, result.observation.images, result.reward, result.terminated

        invalid = respond("xyzzy plugh")
        if same := [action for action in listed if respond(action) == invalid]:
            shown = [*map(repr, same[:3]), *["…"] * (len(same) > 3)]
            facts = {"count": len(same), "listed": len(listed), "response": invalid[0][:60], "actions": shown}
            self.findings["no effect"] = Kind.NO_EFFECT.found(**facts)

    def _reset(self) -> Observation | None:
        return self._call(Kind.RAISED_IN_RESET, "", "reset", validate_observation, **deepcopy(self.task))

    def _step(self, action: str) -> Observation | None:
        """Return the next observation; `None` after an error, and at the end of an episode."""
        result = self._call(Kind.RAISED_IN_STEP, show(action), "step", validate_step, action)
        return None if result is None or result.terminated or result.truncated else result.observation

    def _call(self, kind: Kind, action: str, method: str, validate: Callable, /, *args: Any, **task: Any) -> Any:
        """Return the validated result of a method; after an error `None`, with a finding."""
        try:
            return validate(getattr(self.environment, method)(*args, **task), f"{self.name}.{method}")
        except Exception as error:
            finding = _violation(error, kind, name=self.name, action=action)
            where = finding.facts.get("where", finding.facts["error"])
            self.findings.setdefault(f"{type(error).__name__}{where}", finding)
            return None
