"""Prompt templates and completion parsers: chat messages that fit into a limit, completion -> action and validity."""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..utils.errors import G2POError
from ..utils.images import PLACE, Picture
from .conversation import Message, without_places

T = TypeVar("T")
FALLBACK_CHARACTERS = 30  # of the end of a completion without an action, as in the released code


class ParsedCompletion(NamedTuple):
    """The action in a completion; `valid`: the completion has the required format."""

    action: str
    valid: bool


def parse_think_action(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Parse `<think>…</think><action>…</action>`: the first action outside of the thought, as written.

    A completion is valid if it has all four tags. If the chat template opens `<think>` itself, the completion need
    not; if the template also closes it (thinking disabled), an action alone is valid. For an invalid completion, the
    action is played if there is one, otherwise its last 30 characters. `prompt_end` shows what the template opened.
    """
    action, thought = read_after_thought(completion, "action", prompt_end)
    text = completion[-FALLBACK_CHARACTERS:] if action is None else action
    return ParsedCompletion(text.strip(), action is not None and thought)


def read_after_thought(completion: str, tag: str, prompt_end: str = "") -> tuple[str | None, bool]:
    """Return the content of the first `<tag>…</tag>` outside of the thought, and whether the thought is complete.

    A thought may quote the tags of a thought ("inside <think> </think>, then …"): they nest. If they are unbalanced,
    the thought ends at its last `</think>`; if it never ends, the first `<tag>…</tag>` anywhere is returned.
    """
    ended = after_end = prompt_end.rstrip().endswith("</think>")
    thoughts = depth = int(prompt_end.rstrip().endswith("<think>"))
    unpaired, outside, behind, every = False, [], [], []  # outside thoughts; behind the last of them; anywhere
    tags = re.compile(rf"<think>|</think>|<{tag}>((?:(?!</?(?:think|{tag})>).)*)</{tag}>", re.DOTALL | re.IGNORECASE)
    for match in tags.finditer(completion):
        if (content := match[1]) is not None:
            every.append(content)
            outside += [content] * (depth == 0)
            behind += [content] * after_end
            continue
        behind, after_end = [], match[0].startswith("</")
        if not after_end:
            thoughts, depth = thoughts + 1, depth + 1
        elif thoughts:
            unpaired |= depth == 0
            depth, ended = max(0, depth - 1), True
        else:  # an unopened thought ends here, so a tag before it was inside
            outside = []
    chosen = behind if behind and (unpaired or not outside) else outside
    return next(iter(chosen or every), None), bool(chosen) and ended


def parse_plain(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Return the whole completion as the action. Only an empty completion is invalid."""
    return ParsedCompletion(completion.strip(), bool(completion.strip()))


def as_it_is(observation: str) -> str:
    """Return the observation."""
    return observation


def last_line(observation: str) -> str:
    """Return the last line of an observation."""
    return observation.rpartition("\n")[2]


def last_steps(steps: Sequence[T], history_length: int) -> Sequence[T]:
    """Return the steps that a prompt shows: the last `history_length`, none for 0."""
    return steps[max(0, len(steps) - history_length) :]


@dataclass(frozen=True)
class PromptTemplate:
    """The wording of prompts, and the parser of completions.

    A prompt is one user message per step, rendered by the model's chat template. Slots are written as in `str.format`.

    Args:
        first: the message of an episode's first step. Slots: `{task}`, `{observation}`, `{actions}`.
        later: the message of all other steps. More slots: `{history}`, `{history_length}` (steps shown),
            `{steps_taken}`, `{current_step}`.
        history_entry: one past step. Slots: `{step}`, `{observation}`, `{action}`.
        history_separator, actions_separator: text between past steps, and between admissible actions.
        turn: the user message after a completion, in a conversation. Slots: `{observation}`, `{actions}`. `None`: the
            observation, and the admissible actions if `later` lists them.
        system: a system message, or `None`.
        parse_completion: the completion and the end of the prompt -> `ParsedCompletion`.
        match_case: if `False`, an action that differs from one admissible action in letter case only is replaced by
            it.
        show_observation: the observation -> the text that prompts show. Define it in a module, so that `g2po evaluate`
            finds it.
    """

    first: str
    later: str
    history_entry: str = "[Observation {step}: '{observation}', Action {step}: '{action}']"
    history_separator: str = "\n"
    actions_separator: str = "\n"
    turn: str | None = None
    system: str | None = None
    parse_completion: Callable[[str, str], ParsedCompletion] = parse_think_action
    match_case: bool = False
    show_observation: Callable[[str], str] = as_it_is

    def of(self, environment: str | None) -> PromptTemplate:
        """Return the wording of an environment, by its name in a run with several."""
        return self

    def read(
        self, completion: str, prompt_end: str = "", admissible_actions: Sequence[str] | None = None
    ) -> ParsedCompletion:
        """Return the action and validity of a completion, given the end and the listed actions of its prompt."""
        try:
            action, valid = self.parse_completion(completion, prompt_end)
            str.casefold(action)  # a TypeError of what is no text
        except Exception as error:  # of a parser of the user's own, on an odd completion
            name = getattr(self.parse_completion, "__qualname__", "parse_completion")
            warnings.warn(f"{name} raised {type(error).__name__}: the completion is invalid", stacklevel=2)
            action, valid = completion[-FALLBACK_CHARACTERS:].strip(), False
        alike = {one for one in admissible_actions or () if one.casefold() == action.casefold()}
        return ParsedCompletion(alike.pop() if len(alike) == 1 and not self.match_case else action, bool(valid))

    def write(self, action: str, prompt_end: str = "", admissible_actions: Sequence[str] | None = None) -> str:
        """Return a completion with an action, alone or after an empty thought. Raises `G2POError` if neither fits."""
        opened = {"</think>": "", "<think>": "</think>"}
        written = next((rest for end, rest in opened.items() if prompt_end.rstrip().endswith(end)), "<think></think>")
        for text in (action, f"{written}<action>{action}</action>"):
            if self.read(text, prompt_end, admissible_actions).valid:
                return text
        why = f"parse_completion accepts {action!r:.200} neither alone nor in <think></think><action>…</action>"
        raise G2POError(f"{why}: return the whole completion, as the prompt asks for it", "parse_completion")

    def messages(
        self,
        observation: str,
        task: str = "",
        admissible_actions: Sequence[str] | None = None,
        history: Sequence[tuple[str, str]] = (),
        steps_taken: int = 0,
        images: Sequence[Picture] = (),
    ) -> list[Message]:
        """Return the chat messages of one step, after `steps_taken` others.

        `history` has the (observation, action) pairs to show, oldest first; `images` are shown before the observation.
        """
        past_steps = [
            self.history_entry.format(step=step, observation=self.show_observation(past), action=action)
            for step, (past, action) in enumerate(history, steps_taken - len(history) + 1)
        ]
        slots = {"task": task, "history": self.history_separator.join(past_steps), "history_length": len(history)}
        slots |= {"steps_taken": steps_taken, "current_step": steps_taken + 1}
        wording = self.first if steps_taken == 0 else self.later
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, self._user(wording, observation, admissible_actions, images, **slots)]

    def turn_message(
        self, observation: str, admissible_actions: Sequence[str] | None = None, images: Sequence[Picture] = ()
    ) -> Message:
        """Return the user message that follows a completion in a conversation."""
        ending = "\n\nPossible actions:\n{actions}" if "{actions}" in self.later else ""
        turn = "{observation}" + ending if self.turn is None else self.turn
        return self._user(turn, observation, admissible_actions, images)

    def _user(self, wording: str, observation: str, actions: Any, images: Sequence[Picture], **slots: Any) -> Message:
        slots |= {"observation": self.show_observation(observation)}
        slots |= {"actions": self.actions_separator.join(actions or ())}
        if images:
            slots = {name: without_places(part) if isinstance(part, str) else part for name, part in slots.items()}
            slots["observation"] = PLACE * len(images) + slots["observation"]
        shown = {"images": list(images)} if images else {}
        return {"role": "user", "content": wording.format(**slots), **shown}


# The text shared by all prompts comes first: `token_layout: shared` processes a shared prefix once.
_ASKED = "{task}\nThink inside <think> </think>, then give one action inside <action> </action>.\n\n"
_DONE = "Steps taken so far: {steps_taken}. The last {history_length}:\n{history}\n\nStep {current_step}. "
_SEEN = "Observation: {observation}\n\nPossible actions:\n{actions}"
DEFAULT_PROMPT = PromptTemplate(first=_ASKED + _SEEN, later=_ASKED + _DONE + _SEEN)


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, text, and images in the order of their tokens; `truncated`: content was removed to fit.

    Of a conversation: the `messages` that it shows; how many of them an earlier prompt has, whose ids and completion
    this one `continues` (0: none), and then the text of the others alone.
    """

    ids: list[int]
    text: str
    images: Sequence[Picture] = ()
    truncated: bool = False
    messages: Sequence[Message] = ()
    continues: int = 0


class PromptError(G2POError):
    """A prompt that cannot be made. The episode ends for the cause with which the message begins."""


def within(prompt: Prompt, max_length: int | None, what: str, remedy: str) -> Prompt:
    """Return a prompt of `what` that has at most `max_length` tokens; `PromptError` for a longer one."""
    if max_length is not None and len(prompt.ids) > max_length:
        why = f"prompt too long: {what} {len(prompt.ids)} tokens, more than max_prompt_length={max_length}"
        raise PromptError(f"{why}: raise it, or {remedy}", "max_prompt_length")
    return prompt


def fit_prompt(
    template: PromptTemplate,
    encode: Callable[[list[dict[str, Any]]], tuple[list[int], str]],
    max_length: int | None,
    observation: str,
    history: Sequence[tuple[str, str]] = (),
    **shown: Any,
) -> Prompt:
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation. What else is `shown`, the
    further arguments of `PromptTemplate.messages`, stays: if it is too long alone, `PromptError` is raised.
    `encode` turns chat messages into (token ids, text).
    """
    images, length = shown.get("images", ()), len(observation)

    def messages(keep: int) -> list[Message]:
        return template.messages(cut_middle(observation, keep), history=history, **shown)

    def size(keep: int) -> int:
        return len(encode(without_images(messages(keep)))[0])

    prompt = Prompt(*encode(messages(length)), images)
    if max_length is None or len(prompt.ids) <= max_length:
        return prompt
    limit = max_length - len(prompt.ids) + size(length)  # of what is no image: a processor is slow
    while history and size(length) > limit:
        history = history[1:]
    prompt = Prompt(*encode(messages(longest(size, length, limit))), images, truncated=True)
    return within(prompt, max_length, "the task, the admissible actions and the images alone take", "shorten them")


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the marks of their images as text."""
    return [{name: part for name, part in message.items() if name != "images"} for message in messages]


def longest(size: Callable[[int], int], length: int, limit: int) -> int:
    """Return the most characters of `length` with which `size`, a number of tokens, is within a limit; else none."""
    keeps = range(length, 0, -1)
    return length if size(length) <= limit else length - bisect_left(keeps, True, key=lambda keep: size(keep) <= limit)


def cut_middle(text: str, keep: int) -> str:
    """Return a text without its middle: `keep` characters in all, from its beginning and end."""
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"
