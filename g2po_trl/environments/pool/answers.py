"""What a worker answers, as bytes.

Code that a model wrote may run in a worker, so nothing here is unpickled: an answer is JSON, it names its job by a
number that cannot be guessed, and the pool checks it as the worker has done before.

An answer is `[job, seconds, mark, result]`. Its result is `null`, `[kind, message]`, or
`{"seen": […], "step": [reward, terminated, truncated, info]}`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from ..contract import Observation, StepResult
from ..validation import check_info
from .channel import LARGEST

_CODE = ("utf-8", "surrogatepass")  # in `info` there may be half a character
KINDS = ("exception", "timeout", "invalid", "lost")  # of failures that a worker tells of


class NoAnswerError(ValueError):
    """A worker has said what no worker says."""


@dataclass(frozen=True)
class Answer:
    """What a worker says to a job.

    Args:
        job: the number that its job came with.
        seconds: it has taken.
        mark: of the result, see `worker.mark`; `None`: of a failure.
        result: `(kind, message)` of a failure; `None`: it was played again, and is what it was.
    """

    job: int
    seconds: float
    mark: str | None
    result: Observation | StepResult | tuple[str, str] | None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_to_text = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
_from_text = json.JSONDecoder(parse_constant=_refuse).decode


def encode(answer: Answer) -> bytes:
    """The answer as a worker sends it.

    Raises:
        ValueError: when it has no JSON, as a number of 5,000 digits, or is too large.
    """
    result = answer.result
    if isinstance(result, (Observation, StepResult)):
        seen, fields = result, {}
        if isinstance(result, StepResult):
            seen = result.observation
            fields["step"] = [result.reward, result.terminated, result.truncated, result.info]
        fields["seen"] = [seen.text, seen.state_key, seen.admissible_actions, seen.task]
        result = fields
    message = _to_text([answer.job, answer.seconds, answer.mark, result]).encode(*_CODE)
    if len(message) > LARGEST:
        raise ValueError(f"it has {len(message):,} bytes, more than {LARGEST:,}")
    return message


def decode(message: bytes) -> Answer:
    """What `encode` made into these bytes. They may come from anybody.

    Raises:
        NoAnswerError: for all other bytes.
    """
    try:
        job, seconds, mark, result = _from_text(message.decode(*_CODE))
        if type(job) is not int or type(seconds) is not float or not math.isfinite(seconds) or seconds < 0:
            raise ValueError("it has no job, or no time")
        if mark is not None and type(mark) is not str:
            raise ValueError("its mark is none")
        return Answer(job, seconds, mark, _result(result))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NoAnswerError(f"{error!r:.200}") from error


def _result(result: Any) -> Observation | StepResult | tuple[str, str] | None:
    if result is None:
        return None
    if isinstance(result, list):
        kind, text = result
        if kind not in KINDS or type(text) is not str:
            raise ValueError("it is no failure")
        return kind, text
    seen = _observation(*result["seen"])
    return _step(seen, *result["step"]) if "step" in result else seen


def _observation(text: Any, state_key: Any, admissible_actions: Any, task: Any) -> Observation:
    """As `checks.validate_observation`, for what was JSON."""
    texts = [one for one in (text, state_key, task) if one is not None]
    if text is None or type(admissible_actions) not in (list, type(None)):
        raise ValueError("it is no observation")
    "".join([*texts, *(admissible_actions or ())]).encode()  # all are texts, and whole ones
    return Observation(text, state_key, admissible_actions, task)


def _step(observation: Observation, reward: Any, terminated: Any, truncated: Any, info: Any) -> StepResult:
    """As `checks.validate_step`, for what was JSON."""
    ends = type(terminated) is type(truncated) is bool
    if type(reward) is not float or not math.isfinite(reward) or not ends or type(info) is not dict:
        raise ValueError("it is no step")
    check_info(info, "a worker")
    return StepResult(observation, reward, terminated, truncated, info)
