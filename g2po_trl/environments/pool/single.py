"""One environment in a worker process, called as if it were here: how `g2po_trl.cli.commands.check` looks at it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from ..adapters.trl_tools import ToolEnvironment
from ..contract import Observation, StepResult, TextEnvironment
from ..contract_violations import find_violations
from ..validation import EnvironmentContractError, factory_name, validate_step
from .pool import EnvironmentFailure, EnvironmentPool


class FailedError(Exception):
    """An environment did not do what was asked of it."""

    def __init__(self, failure: EnvironmentFailure):
        self.failure = failure


class _Examined(TextEnvironment):
    """In a worker: an environment whose contract is checked when it is reset to a task for the first time, and whose
    last action is played once more, to see what that pays. All that the check finds is one error, a line each; the
    next reset to the task plays it."""

    def __init__(self, environment_factory: Callable[[], TextEnvironment], checked: list[dict[str, Any]]):
        self.factory, self.environment, self.checked = environment_factory, None, checked

    def reset(self, **task) -> Observation | str:
        if task not in self.checked:
            self.checked.append(deepcopy(task))  # reset may change what it is given
            if found := list(find_violations(self.factory, deepcopy(task))):
                raise EnvironmentContractError("\n".join(found))
        self.environment = self.environment or self.factory()
        return self.environment.reset(**task)

    def step(self, action: str) -> StepResult:
        result = validate_step(self.environment.step(action), "step")
        if result.terminated or result.truncated:
            try:
                again = validate_step(self.environment.step(action), "step").reward
            except Exception:  # to refuse is fine
                again = 0.0
            result.info["paid_after_the_end"] = again
        return result

    def close(self) -> None:
        if self.environment:
            self.environment.close()


class RemoteProcessEnvironment:
    """One environment in a worker, as if it were here, but with time limits."""

    def __init__(self, environment_factory: Callable[[], TextEnvironment], **options: Any):
        checked: list[dict[str, Any]] = []  # in the worker: an environment that fails is not used again

        def examined() -> TextEnvironment:
            return _Examined(environment_factory, checked)

        examined.__name__ = factory_name(environment_factory)
        self.tool_schemas: str | None = None  # the tools of a class in TRL's style
        if isinstance(environment_factory, partial) and environment_factory.func is ToolEnvironment:
            self.tool_schemas = (*environment_factory.args, None)[2]
        self.pool = EnvironmentPool(examined, **options)

    def reset(self, **task: Any) -> Observation:
        return self._answer(self.pool.reset([task])[0])

    def step(self, action: str) -> StepResult:
        return self._answer(self.pool.step({0: action})[0])

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, EnvironmentFailure):
            raise FailedError(answer)
        return answer

    def __enter__(self) -> RemoteProcessEnvironment:
        return self

    def __exit__(self, *exception) -> None:
        self.pool.close()
