"""Texts of a page, deduplicated, and prompts decoded from token ids."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from ..trajectory import Step, Trajectory, image_file
from ..utils.images import PLACE, Picture
from .words import action_text, new_messages, state_text

ONE_LINE = 60  # characters of arguments in a line
_NAME = re.compile("[0-9a-f]{32}")  # of an image
_IMAGE_BYTES, _PAGE_BYTES = 2**18, 2**24  # of an image that is shown as it is; of all images of an iteration or a set
_THUMBNAIL = (512, 512)  # pixels of a larger one
BYTES = 4  # of a character, at most, each perhaps a token
_FACTS = ("ignored_fields", "refused_requests", "out_of_turns", "agent_error", "traceback", "program")
_TEXTS = ("diff", "verify")  # of a workspace
_ELSEWHERE = ("success", "failure_reason", "trial", "last_trial", "panel_index", "reflections")  # on the page
_ELSEWHERE += ("prompt_tokens", "completion_tokens")


class Texts:
    """Deduplicated texts, and images as data URLs, of a run's or evaluation's folder."""

    def __init__(self, folder: Path = Path()):
        self._numbers: dict[str, int] = {}
        self._images: dict[str, int] = {}
        self._files, self._room = folder / "trajectories" / "of", _PAGE_BYTES

    @property
    def all(self) -> list[str]:
        """The texts, by number."""
        return list(self._numbers)

    def number(self, text: str | None) -> int | None:
        """Return the number of a text; `None` for `None`."""
        return None if text is None else self._numbers.setdefault(text, len(self._numbers))

    def images(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of images, each a data URL, or a text with the reason why it is not shown."""
        for name in names:
            if name not in self._images:
                shown = _image_url(image_file(self._files, name), self._room)
                self._room -= len(shown)
                self._images[name] = self.number(shown)
        return [self._images[name] for name in names]


def _image_url(file: Path, room: int) -> str:
    """Return an image as a data URL, scaled down if it is large, or the reason why there is none."""
    if not _NAME.fullmatch(file.stem) or not file.is_file():
        return f"an image whose file {file.name} is not there"
    picture = Picture(file.read_bytes())
    url = picture.data_url
    if len(picture.png) > _IMAGE_BYTES:
        smaller, image = io.BytesIO(), picture.open()
        image.thumbnail(_THUMBNAIL)
        image.save(smaller, "JPEG", quality=80)
        url = f"data:image/jpeg;base64,{base64.b64encode(smaller.getvalue()).decode()}"
    return url if len(url) <= room else f"an image that would make the page too large: {file.name}"


class Prompts:
    """Prompts of a run's steps, decoded by the tokenizer in its folder, or until it is saved by that of `model`."""

    def __init__(self, folder: Path, model: str | None = None):
        self._folder, self._model = folder, model

    def decode(self, step: Step) -> str | None:
        """Return the text of a step's prompt; `None` if there is no tokenizer."""
        if step.prompt is not None or not step.prompt_ids:
            return step.prompt
        return self._decoder(step.prompt_ids) if self._decoder else None

    def tokens(self, step: Step) -> dict[str, Any]:
        """Return a completion's tokens and their log-probabilities as "t" and "lp"; nothing if one is not recorded."""
        recorded = bool(step.logprobs) and len(step.logprobs) == len(step.completion_ids)
        if not recorded or None in step.logprobs or not self._decoder:  # an engine may not know one
            return {}
        ids, texts, logprobs, start = tuple(step.completion_ids), [], [], 0
        for end in range(1, len(ids) + 1):
            before = ids[max(0, start - 1) : start]  # without the token before it, a text may lose its first space
            text = self._piece(before + ids[start:end])[len(self._piece(before)) :]
            if "\ufffd" in text and end < len(ids) and end - start < BYTES:  # a part of a character
                continue
            texts.append(text)
            logprobs.append(round(sum(step.logprobs[start:end]), 2))
            start = end
        return {"t": texts, "lp": logprobs}

    @cached_property
    def _piece(self) -> Callable[[tuple[int, ...]], str]:
        return lru_cache(2**16)(lambda ids: self._decoder(list(ids)))

    @cached_property
    def _decoder(self) -> Callable[[Sequence[int]], str] | None:
        places = [self._folder, *sorted(self._folder.glob("checkpoint-*"))]
        places += [_folder_of(self._model)] if self._model else []
        place = next((p for p in places if (p / "tokenizer.json").is_file()), None)
        return None if place is None else _decoder_in(place)


def step_data(step: Step, texts: Texts, prompts: Prompts | None) -> dict[str, Any]:
    """Return a step as plain data, texts by number.

    Keys: "o" observation, "a" action, "r" completion, "p" prompt, "ok" whether the completion is valid, "in" whether
    the action is admissible (`None` if none were listed), and those of `shown_data`. With prompts, and
    log-probabilities that the run recorded: "t" the completion's tokens, "lp" their log-probabilities.
    """
    return {
        "o": texts.number(state_text(step)),
        "a": action_text(step),
        "r": texts.number(step.completion),
        "p": texts.number(prompts.decode(step)) if prompts else None,
        "ok": bool(step.valid),
        "in": step.admissible,
        **(prompts.tokens(step) if prompts else {}),
        **shown_data(step, texts),
    }


def task_data(trajectory: Trajectory, number: Callable[[str], Any]) -> dict[str, Any]:
    """Return the task of an episode: "id", "task" (its goal in words), "row" (a text's number), "environment"."""
    return {
        "id": trajectory.task_id,
        "task": trajectory.task,
        "row": number(_as_json(trajectory.row)) if trajectory.row else None,
        "environment": trajectory.environment,
    }


def shown_data(step: Step, texts: Texts) -> dict[str, Any]:
    """Return the images of an observation as "img" if there are any, or the messages that a chat request answers.

    Keys: "m" messages, "old" how many of them the model had read before, "said" the assistant's message. A message has
    "role", "name", "c" (its content) and "calls", pairs of name and arguments.
    """
    if step.messages is None:
        return {"img": texts.images(step.images)} if step.images else {}
    return {
        "m": [_message_data(message, texts) for message in step.messages],
        "old": len(step.messages) - len(new_messages(step)),
        "said": _message_data(step.response, texts),
    }


def _message_data(message: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    images = message.get("images")
    return {
        "role": message["role"],
        "name": message.get("name"),
        "c": texts.number(message["content"].replace(PLACE, "") if images else message["content"]),
        **({"img": texts.images(images)} if images else {}),
        "calls": [[function["name"], texts.number(_as_json(function["arguments"]))] for function in functions],
    }


def _as_json(value: Any) -> str:
    """Return JSON on one line if it is short. A string (JSON that could not be parsed) is unchanged."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= ONE_LINE else json.dumps(value, ensure_ascii=False, indent=2)


def episode_data(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    """Return an episode as plain data, without its steps.

    "facts" of an episode of chat requests are the entries of `info` about the agent; its "other" is the rest as text.
    """
    facts: dict[str, Any] = {}
    if any(step.messages is not None for step in trajectory.steps):
        told = {name: value for name, value in trajectory.info.items() if value not in (None, False, [], {})}
        facts = {name: told[name] for name in _FACTS if name in told}
        facts |= {name: texts.number(str(told[name])) for name in _TEXTS if name in told}
        other = {name: value for name, value in told.items() if name not in (*_FACTS, *_TEXTS, *_ELSEWHERE)}
        facts |= {"other": texts.number(_as_json(other))} if other else {}
    return {
        "facts": facts,
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "error": trajectory.error or trajectory.failure_reason,
        "final": texts.number(trajectory.final_observation),
    }


@lru_cache(maxsize=4)
def _decoder_in(place: Path) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer  # decodes as transformers does, without its import time of about 10 s

    return partial(Tokenizer.from_file(str(place / "tokenizer.json")).decode, skip_special_tokens=False)


def _folder_of(model: str) -> Path:
    """Return the folder of a local model, or of one of the Hub that is in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = None
    with suppress(ValueError):  # a name that the Hub cannot have
        found = try_to_load_from_cache(model, "tokenizer.json")
    return Path(found).parent if isinstance(found, str) else Path(model)
