"""Texts of a page: each once, and a prompt's from its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..trajectory import Step, Trajectory


class Texts:
    """Each text once: observations repeat themselves, that is the point of the graph."""

    def __init__(self):
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        """The place of a text in `all`; `None` for none."""
        if text is None:
            return None
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


class Prompts:
    """The prompts of a run's steps, decoded by the tokenizer that the run saved, if it did.

    Args:
        folder: a run's. tokenizer: another one.
    """

    def __init__(self, folder: Path, tokenizer=None):
        self._folder, self._tokenizer, self._looked = folder, tokenizer, tokenizer is not None

    def of(self, step: Step) -> str | None:
        if step.prompt is not None or not step.prompt_ids:
            return step.prompt
        if not self._looked:
            self._looked, self._tokenizer = True, _load_tokenizer(self._folder)
        return self._tokenizer.decode(step.prompt_ids) if self._tokenizer else None


def step_data(step: Step, texts: Texts, prompt_of: Callable[[Step], str | None] | None) -> dict[str, Any]:
    """What is read of a step: observation, action, reply and prompt (texts by number), was the reply valid, and the
    action admissible (`None`: none were listed)?"""
    return {
        "o": texts.number(step.observation),
        "a": step.action,
        "r": texts.number(step.reply),
        "p": texts.number(prompt_of(step)) if prompt_of else None,
        "ok": bool(step.valid),
        "in": step.admissible,
    }


def episode_data(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    """What is read of an episode besides its steps."""
    return {
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "error": trajectory.error or trajectory.failure_reason,
        "final": texts.number(trajectory.final_observation),
    }


class _FastTokenizer:
    """Decodes as transformers does, which would take ten seconds to import."""

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
