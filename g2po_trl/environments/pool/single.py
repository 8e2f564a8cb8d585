"""One environment in a worker process with a synchronous interface, for `g2po check`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from ..adapters.trl_tools import ToolEnvironment
from ..contract import Observation, StepResult, TextEnvironment
from ..contract_violations import find_violations
from ..validation import EnvironmentContractError, factory_name, validate_step
from .limits import PoolLimits
from .pool import EnvironmentFailure, EnvironmentPool


class EnvironmentFailedError(Exception):
    """An environment failed; `failure` is the `EnvironmentFailure`."""

    def __init__(self, failure: EnvironmentFailure):
        self.failure = failure


class _CheckedEnvironment(TextEnvironment):
    """Environment in a worker that checks its contract at the first reset of each task.

    The violations are one error, a line each; the next reset of the task plays it. The last action of an episode is
    repeated after its end, to see whether that returns a reward.
    """

    def __init__(self, environment_factory: Callable[[], TextEnvironment], checked: list[dict[str, Any]]):
        self.factory, self.environment, self.checked = environment_factory, None, checked

    def reset(self, **task) -> Observation | str:
        if task not in self.checked:
            self.checked.append(deepcopy(task))  # reset may change its arguments
            if found := list(find_violations(self.factory, deepcopy(task))):
                raise EnvironmentContractError("\n".join(found))
        self.environment = self.environment or self.factory()
        return self.environment.reset(**task)

    def step(self, action: str) -> StepResult:
        result = validate_step(self.environment.step(action), "step")
        if result.terminated or result.truncated:
            try:
                again = validate_step(self.environment.step(action), "step").reward
            except Exception:  # raising is acceptable
                again = 0.0
            result.info["paid_after_the_end"] = again
        return result

    def close(self) -> None:
        if self.environment:
            self.environment.close()


class RemoteProcessEnvironment:
    """One environment in a worker process, with time limits.

    `tool_schemas`: the schemas of a tool-based class's tools, else `None`.
    """

    def __init__(self, environment_factory: Callable[[], TextEnvironment], limits: PoolLimits):
        checked: list[dict[str, Any]] = []  # kept in the worker, since a failed environment is not used again

        def checked_factory() -> TextEnvironment:
            return _CheckedEnvironment(environment_factory, checked)

        checked_factory.__name__ = factory_name(environment_factory)
        self.tool_schemas: str | None = None
        if isinstance(environment_factory, partial) and environment_factory.func is ToolEnvironment:
            self.tool_schemas = (*environment_factory.args, None)[2]
        self.pool = EnvironmentPool(checked_factory, limits)

    def reset(self, **task: Any) -> Observation:
        return self._answer(self.pool.reset([task])[0])

    def step(self, action: str) -> StepResult:
        return self._answer(self.pool.step({0: action})[0])

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, EnvironmentFailure):
            raise EnvironmentFailedError(answer)
        return answer

    def __enter__(self) -> RemoteProcessEnvironment:
        return self

    def __exit__(self, *exception) -> None:
        self.pool.close()
