"""Encode and decode the answers of workers.

Code written by a model may run in a worker, so the pool unpickles nothing: an answer is JSON, names its job by an
unguessable number, and passes the environment's own validation again in the pool.

An answer is `[job, digest, result, seconds]`. Its result is `null`, `[kind, message]`, or
`{"seen": […], "step": [reward, terminated, truncated, info], "images": [[hash, …], {hash: PNG in base64}]}`, the bytes
of an image once an episode.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from ...prompts.conversation import ChatRequest, pictures_of
from ...utils.images import Picture, read_png
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


def pictures_in(answer: Observation | StepResult) -> list[Picture]:
    """Return the images of an answer, also those of earlier messages of a request."""
    seen = answer.observation if isinstance(answer, StepResult) else answer
    return [*seen.images, *(() if seen.request is None else pictures_of(seen.request.messages))]


def encode(answer: Answer, shown: set[str] | None = None) -> bytes:
    """Return the answer as bytes. Raises `ValueError` if it is too large, or cannot be written as JSON.

    `shown`: images whose bytes the reader has; those of this answer are added.
    """
    result, shown = answer.result, set() if shown is None else shown
    if isinstance(result, (Observation, StepResult)):
        seen, fields = result, {}
        if isinstance(result, StepResult):
            seen = result.observation
            fields["step"] = [result.reward, result.terminated, result.truncated, result.info]
        request = None if seen.request is None else vars(seen.request)
        fields["seen"] = [seen.text, seen.state_key, seen.admissible_actions, seen.task, request]
        if pictures := pictures_in(result):
            new = {one: base64.b64encode(one.png).decode() for one in pictures if one not in shown}
            fields["images"] = [seen.images, new]
            shown.update(new)
        result = fields
    message = _to_text([answer.job, answer.digest, result, answer.seconds]).encode(*_CODE)
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"it has {len(message):,} bytes, more than {MAX_MESSAGE_BYTES:,}")
    return message


def decode(message: bytes, pictures: dict[str, Picture] | None = None) -> Answer:
    """Return the answer in bytes from an untrusted process. Raises `InvalidAnswerError` for all other bytes.

    `pictures`: images of the episode so far, by their hashes; new ones are added.
    """
    try:
        job, digest, result, seconds = json.loads(message.decode(*_CODE))
        are_kinds = type(job) is int and isinstance(digest, (str, type(None))) and type(seconds) is float
        if not are_kinds or not 0.0 <= seconds < math.inf:
            raise ValueError("the job, the digest or the seconds are invalid")
        return Answer(job, digest, _result(result, {} if pictures is None else pictures), seconds)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidAnswerError(f"{error!r:.200}") from error


def _result(result: Any, pictures: dict[str, Picture]) -> Observation | StepResult | tuple[str, str] | None:
    if result is None:
        return None
    if isinstance(result, list):
        kind, text = result
        if kind not in KINDS or type(text) is not str:
            raise ValueError("the failure is invalid")
        return kind, text
    *fields, request = result["seen"]
    names, new = result.get("images", ((), {}))
    pictures |= {one: one for one in (read_png(base64.b64decode(png)) for png in new.values())}
    if request is not None:
        request = ChatRequest(**{**request, "messages": [_message(one, pictures) for one in request["messages"]]})
    seen = validate_observation(Observation(*fields, request, [pictures[name] for name in names]), "a worker")
    if "step" not in result:
        return seen
    reward, terminated, truncated, info = result["step"]
    return replace(validate_step(StepResult("", reward, terminated, truncated, info), "a worker"), observation=seen)


def _message(message: dict[str, Any], pictures: dict[str, Picture]) -> dict[str, Any]:
    """Return a message with its images; this process opens no file that a worker names."""
    if type(message["content"]) is not str:
        raise ValueError("the content of a message is invalid")
    return {**message, "images": [pictures[name] for name in message["images"]]} if "images" in message else message
