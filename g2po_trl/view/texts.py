"""Texts of a page, deduplicated, and prompts decoded from token ids."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
_SHOWN = ("success", "failure_reason", "trial", "last_trial", "panel_index", "prompt_tokens", "completion_tokens")
_SHOWN += ("reflections",)  # elsewhere on the page


class Texts:
    """Deduplicated texts, and images as data URLs; observations recur in every group.

    Args:
        folder: folder of the trajectories' run or evaluation.
    """

    def __init__(self, folder: Path = Path()):
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}
        self._images: dict[str, int | None] = {}
        self._files, self._room = folder / "trajectories" / "of", _PAGE_BYTES

    def number(self, text: str | None) -> int | None:
        """Return the position of a text in `all`; `None` for `None`."""
        if text is None:
            return None
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]

    def images(self, names: Sequence[str]) -> list[int]:
        """Return the positions of images in `all`, each a data URL, or a text with the reason why it is not shown."""
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
    data, kind = file.read_bytes(), "png"
    if len(data) > _IMAGE_BYTES:
        smaller = io.BytesIO()
        try:
            image = Picture(data).open()
        except Exception:  # PIL raises errors of several classes for broken files
            return f"an image whose file {file.name} is broken"
        image.thumbnail(_THUMBNAIL)
        image.save(smaller, "JPEG", quality=80)
        data, kind = smaller.getvalue(), "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return url if len(url) <= room else f"an image that would make the page too large: {file.name}"


class Prompts:
    """Prompts of a run's steps, decoded by the tokenizer that the run saved, if any.

    Args:
        folder: a run's folder.
        tokenizer: replaces the saved tokenizer.
        model: the trained model, whose tokenizer is used until the run has saved one.
    """

    def __init__(self, folder: Path, tokenizer=None, model: str | None = None):
        self._folder, self._tokenizer, self._model = folder, tokenizer, model
        self._pieces: dict[tuple[bool, tuple[int, ...]], str] = {}

    def decode(self, step: Step) -> str | None:
        """Return the text of a step's prompt; `None` if there is no tokenizer."""
        if step.prompt is not None or not step.prompt_ids:
            return step.prompt
        return self._decode(step.prompt_ids) if self._decode else None

    def tokens(self, step: Step) -> dict[str, Any]:
        """Return a completion's tokens and their log-probabilities as "t" and "lp"; nothing if one is not recorded."""
        recorded = bool(step.logprobs) and len(step.logprobs) == len(step.completion_ids)
        if not recorded or None in step.logprobs or not self._decode:  # an engine may not know one
            return {}
        ids, texts, logprobs, start = step.completion_ids, [], [], 0
        for end in range(1, len(ids) + 1):
            text = self._piece(tuple(ids[max(0, start - 1) : end]), start > 0)
            if "\ufffd" in text and end < len(ids) and end - start < BYTES:  # a part of a character
                continue
            texts.append(text)
            logprobs.append(round(sum(step.logprobs[start:end]), 2))
            start = end
        return {"t": texts, "lp": logprobs}

    def _piece(self, ids: tuple[int, ...], follows: bool) -> str:
        """Return the text of tokens; with `follows`, the first token only provides context."""
        if (follows, ids) not in self._pieces:
            before = len(self._decode(list(ids[:1]))) if follows else 0
            self._pieces[follows, ids] = self._decode(list(ids))[before:]
        return self._pieces[follows, ids]

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], str] | None:
        if self._tokenizer is not None:
            return self._tokenizer.decode
        places = [self._folder, *sorted(self._folder.glob("checkpoint-*")), *_folder_of(self._model)]
        place = next((p for p in places if (p / "tokenizer_config.json").is_file()), None)
        return None if place is None else _decoder_in(place)


def step_data(step: Step, texts: Texts, prompts: Prompts | None) -> dict[str, Any]:
    """Return a step as plain data, texts by number.

    Keys: "o" observation, "img" its images, "a" action, "r" completion, "p" prompt, "ok" whether the completion is
    valid, "in" whether the action is admissible (`None` if none were listed). With prompts, and log-probabilities that
    the run recorded: "t" the completion's tokens, "lp" their log-probabilities. A step that answers a chat request
    also has the keys of `conversation_data`; "o" and "a" are then readable texts.
    """
    return {
        "o": texts.number(state_text(step)),
        "a": action_text(step),
        "r": texts.number(step.completion),
        "p": texts.number(prompts.decode(step)) if prompts else None,
        "ok": bool(step.valid),
        "in": step.admissible,
        **_shown_images(step.images if step.messages is None else None, texts),
        **(prompts.tokens(step) if prompts else {}),
        **conversation_data(step, texts),
    }


def task_data(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    """Return the task of an episode: "id", "task" (its goal in words), "row" (as text), "environment"."""
    return {
        "id": trajectory.task_id,
        "task": trajectory.task,
        "row": texts.number(_as_json(trajectory.row)) if trajectory.row else None,
        "environment": trajectory.environment,
    }


def conversation_data(step: Step, texts: Texts) -> dict[str, Any]:
    """Return the messages of a step that answers a chat request, and nothing for other steps.

    Keys: "m" messages, "old" how many of them the model had read before, "said" the assistant's message. A message has
    "role", "name", "c" (its content) and "calls", pairs of name and arguments.
    """
    if step.messages is None:
        return {}
    return {
        "m": [_message_data(message, texts) for message in step.messages],
        "old": len(step.messages) - len(new_messages(step)),
        "said": _message_data(step.response, texts),
    }


def _shown_images(images: Sequence[str] | None, texts: Texts) -> dict[str, list[int]]:
    """Return images as "img"; nothing without any."""
    return {"img": texts.images(images)} if images else {}


def _message_data(message: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    images = message.get("images")
    return {
        "role": message["role"],
        "name": message.get("name"),
        "c": texts.number(message["content"].replace(PLACE, "") if images else message["content"]),
        **_shown_images(images, texts),
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

    For an episode of chat requests, "facts" are the entries of `info` about the agent, and "other" is the rest as
    text.
    """
    facts: dict[str, Any] = {}
    if any(step.messages is not None for step in trajectory.steps):
        info = {name: value for name, value in trajectory.info.items() if value not in (None, False, [], {})}
        facts = {name: info.pop(name) for name in _FACTS if name in info}
        facts |= {name: texts.number(str(info.pop(name))) for name in _TEXTS if name in info}
        other = {name: value for name, value in info.items() if name not in _SHOWN}
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
    if (place / "tokenizer.json").is_file():  # decodes as transformers does, without its import time of about 10 s
        from tokenizers import Tokenizer

        return partial(Tokenizer.from_file(str(place / "tokenizer.json")).decode, skip_special_tokens=False)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place).decode


def _folder_of(model: str | None) -> list[Path]:
    """Return the folder of a local model, or of one from the Hub that is in the cache; nothing otherwise."""
    if not model:
        return []
    if Path(model).is_dir():
        return [Path(model)]
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "tokenizer_config.json")
    except ValueError:  # a name that the Hub cannot have
        return []
    return [Path(found).parent] if isinstance(found, str) else []
