"""The record of an episode: plain data, in memory and as JSON lines.

A *trajectory* is one episode of one task; a *step* is one turn of it. Everything after the rollout (state graph,
advantages, step samples, viewer) is computed from these two classes alone.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .utils.errors import G2POError
from .utils.images import Picture
from .utils.json import atomic_write, to_json, to_plain
from .utils.masking import HIDDEN, masked

OUTCOMES = ("success", "failure", "truncated", "error", "lost")
_SLOT = re.compile(r"<[^<>]+>")  # in a listed action: what the agent fills in
UNCOUNTED = ("error", "lost")  # no result: in no statistic, trains nothing
LONGEST_ROW = 4_000  # characters of a task's row that are kept
CUT = "<cut>"  # in place of the columns of a longer one


@dataclass
class Step:
    """One turn of an episode: an observation, the completion, and the action.

    Args:
        observation: text of the observation.
        action: text that the environment played.
        valid: whether the completion had the required format.
        state_key: steps of a group with equal keys are in the same state. `None`: the observation is the key.
        completion: text that the model generated.
        admissible_actions: actions that the environment listed.
        reward: reward of this step.
        prompt_ids: token ids that the model read.
        completion_ids: token ids that it generated, trained on as they are, without decoding and encoding again.
        logprobs: log-probabilities of `completion_ids`, if the engine reports them.
        prompt_truncated: the prompt was shortened to `max_prompt_length`.
        completion_truncated: the completion reached its maximum length.
        messages: for a step that answers a chat request, the messages that its prompt adds to the earlier prompt
            that it continues, or all of its messages. The action is then the assistant's message as JSON.
        prompt: in evaluations, the text of the prompt; of chat models, the last message.
        advantage: the step's advantage in the update; `None` without one, as in an episode without a result.
        call: what the completion did with the tools that its prompt offered: `"none"`, `"unreadable"`, `"unknown"` (a
            readable call of a tool that was not offered), `"known"`, or `"readable"` where the names of the tools are
            not known here. `None`: no tools.
        images: hashes of the observation's images; `image_file` returns their files, next to the trajectories.
        prompt_images: hashes of the images that a conversation's prompt shows, in the order of their tokens. `None`:
            `images`.
    """

    observation: str
    action: str
    valid: bool = True
    state_key: str | None = None
    completion: str | None = None
    admissible_actions: list[str] | None = None
    reward: float = 0.0
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    prompt_truncated: bool = False
    completion_truncated: bool = False
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    advantage: float | None = None
    call: str | None = None
    images: list[str] | None = None
    prompt_images: list[str] | None = None

    @property
    def shown_images(self) -> list[str]:
        """Images that the prompt shows, in the order of their tokens."""
        return self.prompt_images or self.images or []

    @property
    def key(self) -> str:
        """The state key: `state_key`, or the observation without one."""
        return self.observation if self.state_key is None else self.state_key

    @property
    def response(self) -> dict[str, Any] | None:
        """The assistant's message of a step that answers a chat request; `None` for other steps.

        An action that is not a message as JSON becomes the content of one.
        """
        if self.messages is None:
            return None
        try:
            answer = json.loads(self.action)
        except ValueError:
            answer = None
        known = isinstance(answer, dict) and isinstance(answer.get("content"), str)
        return {"role": "assistant", **(answer if known else {"content": self.action})}

    @property
    def tool_calls(self) -> int:
        """Number of tool calls in the completion, including calls written in `<tool_call>` tags."""
        if self.messages is None:
            return self.action.count("<tool_call>")
        return len(self.response.get("tool_calls", ()))

    @property
    def compared_action(self) -> str:
        """The part of the action that is compared: of a chat response with tool calls, the calls without ids."""
        calls = (self.response or {}).get("tool_calls")
        return json.dumps([call["function"] for call in calls], sort_keys=True) if calls else self.action

    @property
    def admissible(self) -> bool | None:
        """Whether the action is among `admissible_actions`, in any letter case; `None` if none were listed.

        The action of an invalid completion is never admissible. A part in angle brackets, as in `search[<your
        query>]`, stands for any text.
        """
        if not self.admissible_actions:
            return None
        if not self.valid or self.action in self.admissible_actions:
            return self.valid
        patterns = (".+".join(map(re.escape, _SLOT.split(one.strip().casefold()))) for one in self.admissible_actions)
        return any(re.fullmatch(pattern, self.action.strip().casefold(), re.DOTALL) for pattern in patterns)


@dataclass
class Trajectory:
    """The record of one episode.

    Args:
        task_id: id of the task.
        steps: the turns of the episode.
        reward: sum of the rewards of all steps.
        outcome: `"success"`, `"failure"`, `"truncated"` (a failure at the turn limit), `"error"` (the environment
            raised, timed out or crashed) or `"lost"` (its worker failed because of another episode, and it could not
            be replayed). Trajectories with the last two outcomes are in no statistic and are not trained on.
        final_observation: text of the observation after the last step.
        error: reason of `"error"` and `"lost"`.
        info: `StepResult.info` of the last step that was played.
        failure_reason: why the agent itself ended the episode early, as `"kind"` or `"kind: detail"`, e.g. `"prompt
            too long: …"`. Such an episode is a failure.
        group: number of the group in its rollout.
        task: the goal in words: `Observation.task` of the environment's `reset`.
        environment: name of the environment, in a run with several.
        row: the task's row, the arguments of `reset`, see `stored_row`. `None`: not recorded.

    Raises:
        ValueError: for an unknown outcome.
    """

    task_id: str
    steps: list[Step]
    reward: float
    outcome: str
    final_observation: str | None = None
    error: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    failure_reason: str | None = None
    group: int | None = None
    task: str | None = None
    environment: str | None = None
    row: dict[str, Any] | None = None

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {self.outcome!r}; it must be one of {', '.join(OUTCOMES)}")

    @property
    def success(self) -> bool:
        """Whether the outcome is `"success"`."""
        return self.outcome == "success"

    @property
    def counted(self) -> bool:
        """Whether the episode has a result. Without one (`"error"`, `"lost"`) it enters no statistic and no update."""
        return self.outcome not in UNCOUNTED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """Return the trajectory that `to_dict` returned; fields of other versions are skipped."""
        of_step = {one.name for one in fields(Step)}
        steps = [Step(**{name: step[name] for name in step.keys() & of_step}) for step in data["steps"]]
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data} | {"steps": steps})


def stored_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of a task's row: plain JSON data without secrets.

    Of a row whose text is longer than `LONGEST_ROW`, the beginning of the text is stored, under `CUT`.
    """
    plain = masked(to_plain(row))
    text = to_json(plain)
    return plain if len(text) <= LONGEST_ROW else {CUT: text[:LONGEST_ROW]}


def is_whole(row: Mapping[str, Any]) -> bool:
    """Return whether a row of `stored_row` is complete: has all arguments that `reset` got."""
    return CUT not in row and HIDDEN not in to_json(row)


def note_advantages(trajectories: Sequence[Trajectory], advantages: Sequence[float], groups: Sequence[int]) -> None:
    """Store the advantages of the steps, in order, and the groups with which trajectories are trained."""
    of_step = iter(advantages)
    for trajectory, group in zip(trajectories, groups, strict=True):
        trajectory.group = group
        for step in trajectory.steps:
            advantage = float(next(of_step))
            step.advantage = advantage if trajectory.counted else None


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory], append: bool = False) -> None:
    """Write one trajectory per line, as JSON. Creates the folder.

    With `append` they are added to an existing file. Without, it is replaced once the new one is whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") if append else atomic_write(path) as file:
        for trajectory in trajectories:
            _write_images(path, trajectory)
            file.write(to_json(trajectory.to_dict()) + "\n")


def image_file(path: str | Path, name: str) -> Path:
    """Return the file of an image, from its hash and the file of its trajectories."""
    return Path(path).parent / "images" / f"{name}.png"


def _write_images(path: Path, trajectory: Trajectory) -> None:
    """Write the images of an episode; another rank's or file's may be there."""
    for image in {one for step in trajectory.steps for one in (*(step.images or ()), *step.shown_images)}:
        file = image_file(path, image)
        if isinstance(image, Picture) and not file.exists():
            file.parent.mkdir(exist_ok=True)
            beside = file.with_name(f".{image}.{os.getpid()}")
            beside.write_bytes(image.png)
            beside.replace(file)


def read_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Read a file of `write_jsonl`, one trajectory at a time. An incomplete last line is skipped with a warning.

    Raises:
        ValueError: for any other line that is not a trajectory; the message names file and line.
    """
    for trajectory in read_unfinished(path):
        if trajectory is None:
            warnings.warn(f"{path}: the last line is incomplete and is skipped", stacklevel=2)
        else:
            yield trajectory


def read_unfinished(path: str | Path) -> Iterator[Trajectory | None]:
    """Read like `read_jsonl` a file that may still be written; yield `None` for a last line that is incomplete."""
    with Path(path).open("rb") as file:  # half a character is no text
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield Trajectory.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise G2POError(
                        f"{path}, line {number}: not a trajectory ({error}): restore the file, or delete the line",
                        "trajectories",
                        number,
                    ) from error
                yield None
