"""Encode and decode the answers of workers.

Code written by a model may run in a worker, so the pool unpickles nothing: an answer is JSON, names its job by an
unguessable number, and is validated again by the pool.

An answer is `[job, seconds, digest, result]`. Its result is `null`, `[kind, message]`, or
`{"seen": […], "step": [reward, terminated, truncated, info]}`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from ...prompts.conversation import ChatRequest
from ..contract import Observation, StepResult
from ..validation import check_info
from .channel import MAX_MESSAGE_BYTES

_CODE = ("utf-8", "surrogatepass")  # `info` may contain lone surrogates
KINDS = ("exception", "timeout", "invalid", "lost")  # of failures that a worker reports


class InvalidAnswerError(ValueError):
    """A worker sent a message that is not a valid answer."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a job.

    Args:
        job: the number of the job.
        seconds: duration of the job.
        digest: of the result, see `worker.digest`; `None` for a failure.
        result: `(kind, message)` of a failure; `None`: a replay with the expected digest.
    """

    job: int
    seconds: float
    digest: str | None
    result: Observation | StepResult | tuple[str, str] | None


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


_to_text = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
_from_text = json.JSONDecoder(parse_constant=_reject_constant).decode


def encode(answer: Answer) -> bytes:
    """Return the answer as bytes. Raises `ValueError` if it is too large, or cannot be written as JSON."""
    result = answer.result
    if isinstance(result, (Observation, StepResult)):
        seen, fields = result, {}
        if isinstance(result, StepResult):
            seen = result.observation
            fields["step"] = [result.reward, result.terminated, result.truncated, result.info]
        request = None if seen.request is None else seen.request.to_dict()
        fields["seen"] = [seen.text, seen.state_key, seen.admissible_actions, seen.task, request]
        result = fields
    message = _to_text([answer.job, answer.seconds, answer.digest, result]).encode(*_CODE)
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"it has {len(message):,} bytes, more than {MAX_MESSAGE_BYTES:,}")
    return message


def decode(message: bytes) -> Answer:
    """Return the answer in bytes from an untrusted process. Raises `InvalidAnswerError` for all other bytes."""
    try:
        job, seconds, digest, result = _from_text(message.decode(*_CODE))
        if type(job) is not int or type(seconds) is not float or not math.isfinite(seconds) or seconds < 0:
            raise ValueError("job or duration is invalid")
        if digest is not None and type(digest) is not str:
            raise ValueError("the digest is invalid")
        return Answer(job, seconds, digest, _result(result))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidAnswerError(f"{error!r:.200}") from error


def _result(result: Any) -> Observation | StepResult | tuple[str, str] | None:
    if result is None:
        return None
    if isinstance(result, list):
        kind, text = result
        if kind not in KINDS or type(text) is not str:
            raise ValueError("the failure is invalid")
        return kind, text
    seen = _observation(*result["seen"])
    return _step(seen, *result["step"]) if "step" in result else seen


def _observation(text: Any, state_key: Any, admissible_actions: Any, task: Any, request: Any) -> Observation:
    """Validate an observation from JSON, like `validation.validate_observation`."""
    texts = [part for part in (text, state_key, task) if part is not None]
    if text is None or type(admissible_actions) not in (list, type(None)):
        raise ValueError("the observation is invalid")
    "".join([*texts, *(admissible_actions or ())]).encode()  # raises unless all are strings without lone surrogates
    request = None if request is None else ChatRequest.from_dict(request)
    return Observation(text, state_key, admissible_actions, task, request)


def _step(observation: Observation, reward: Any, terminated: Any, truncated: Any, info: Any) -> StepResult:
    """Validate a step from JSON, like `validation.validate_step`."""
    ends = type(terminated) is type(truncated) is bool
    if type(reward) is not float or not math.isfinite(reward) or not ends or type(info) is not dict:
        raise ValueError("the step is invalid")
    check_info(info, "a worker")
    return StepResult(observation, reward, terminated, truncated, info)
