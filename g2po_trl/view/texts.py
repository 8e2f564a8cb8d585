"""Texts of a page, deduplicated, and prompts decoded from token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..trajectory import Step, Trajectory


class Texts:
    """Deduplicated texts; observations recur in every group."""

    def __init__(self):
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        """Return the position of a text in `all`; `None` for `None`."""
        if text is None:
            return None
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


class Prompts:
    """Prompts of a run's steps, decoded by the tokenizer that the run saved, if any.

    Args:
        folder: a run's folder.
        tokenizer: replaces the saved tokenizer.
    """

    def __init__(self, folder: Path, tokenizer=None):
        self._folder, self._tokenizer, self._loaded = folder, tokenizer, tokenizer is not None

    def decode(self, step: Step) -> str | None:
        """Return the text of a step's prompt; `None` if there is no tokenizer."""
        if step.prompt is not None or not step.prompt_ids:
            return step.prompt
        if not self._loaded:
            self._loaded, self._tokenizer = True, _load_tokenizer(self._folder)
        return self._tokenizer.decode(step.prompt_ids) if self._tokenizer else None


def step_data(step: Step, texts: Texts, prompt_of: Callable[[Step], str | None] | None) -> dict[str, Any]:
    """Return a step as plain data, texts by number.

    Keys: "o" observation, "a" action, "r" completion, "p" prompt, "ok" whether the completion is valid, "in" whether
    the action is admissible (`None` if none were listed).
    """
    return {
        "o": texts.number(step.observation),
        "a": step.action,
        "r": texts.number(step.completion),
        "p": texts.number(prompt_of(step)) if prompt_of else None,
        "ok": bool(step.valid),
        "in": step.admissible,
    }


def episode_data(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    """Return an episode as plain data, without its steps."""
    return {
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "error": trajectory.error or trajectory.failure_reason,
        "final": texts.number(trajectory.final_observation),
    }


class _FastTokenizer:
    """A tokenizer that decodes as transformers does, without its import time of about 10 s."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _load_tokenizer(folder: Path):
    places = [folder, *sorted(folder.glob("checkpoint-*"))]
    place = next((p for p in places if (p / "tokenizer_config.json").is_file()), None)
    if place is None:
        return None
    if (place / "tokenizer.json").is_file():
        return _FastTokenizer(place / "tokenizer.json")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)
