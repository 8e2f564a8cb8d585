"""Encode and decode the answers of workers.

Code written by a model may run in a worker, so the pool unpickles nothing: an answer is JSON, names its job by an
unguessable number, and passes the environment's own validation again in the pool.

An answer is `[job, digest, result, seconds]`. Its result is `null`, `[kind, message]`, or
`{"seen": […], "step": [reward, terminated, truncated, info]}`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from ...prompts.conversation import ChatRequest
from ..contract import Observation, StepResult
from ..validation import validate_observation, validate_step
from .channel import MAX_MESSAGE_BYTES

_CODE = ("utf-8", "surrogatepass")  # `info` may contain lone surrogates
KINDS = ("exception", "timeout", "invalid", "lost")  # of failures that a worker reports


class InvalidAnswerError(ValueError):
    """A worker sent a message that is not a valid answer."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer to the job of this number."""

    job: int
    digest: str | None  # see `worker.digest`; `None` for a failure
    result: Observation | StepResult | tuple[str, str] | None  # kind and message; `None`: replayed as expected
    seconds: float = 0.0  # for which the job ran


_to_text = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode


def encode(answer: Answer) -> bytes:
    """Return the answer as bytes. Raises `ValueError` if it is too large, or cannot be written as JSON."""
    result = answer.result
    if isinstance(result, (Observation, StepResult)):
        seen, fields = result, {}
        if isinstance(result, StepResult):
            seen = result.observation
            fields["step"] = [result.reward, result.terminated, result.truncated, result.info]
        request = None if seen.request is None else vars(seen.request)
        fields["seen"] = [seen.text, seen.state_key, seen.admissible_actions, seen.task, request]
        result = fields
    message = _to_text([answer.job, answer.digest, result, answer.seconds]).encode(*_CODE)
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"it has {len(message):,} bytes, more than {MAX_MESSAGE_BYTES:,}")
    return message


def decode(message: bytes) -> Answer:
    """Return the answer in bytes from an untrusted process. Raises `InvalidAnswerError` for all other bytes."""
    try:
        job, digest, result, seconds = json.loads(message.decode(*_CODE))
        if type(job) is not int or not isinstance(digest, (str, type(None))):
            raise ValueError("the job or the digest is invalid")
        if type(seconds) is not float or not 0.0 <= seconds < math.inf:
            raise ValueError("the seconds are invalid")
        return Answer(job, digest, _result(result), seconds)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidAnswerError(f"{error!r:.200}") from error


def _result(result: Any) -> Observation | StepResult | tuple[str, str] | None:
    if result is None:
        return None
    if isinstance(result, list):
        kind, text = result
        if kind not in KINDS or type(text) is not str:
            raise ValueError("the failure is invalid")
        return kind, text
    *fields, request = result["seen"]
    request = None if request is None else ChatRequest(**request)
    seen = validate_observation(Observation(*fields, request), "a worker")
    if "step" not in result:
        return seen
    reward, terminated, truncated, info = result["step"]
    return replace(validate_step(StepResult("", reward, terminated, truncated, info), "a worker"), observation=seen)
