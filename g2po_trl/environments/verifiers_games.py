"""Environments of the `verifiers` library: `MultiTurnEnv` and what derives from it (tool and single-turn ones too).

    environment_factory = partial(VerifiersEnvironment, "wordle", env_args={"use_think": False})
    # dataset rows: {"example_id": 0}, …: rows of the environment's own dataset

The library plays its own rollout and asks a client for the model's replies. The client here waits for `step`: between
two steps the rollout rests in it. So stop conditions, tools and the rubric are the library's own. Its rubric scores
the episode when it is over, and that is the only reward.

The model is shown the first messages as the task and then what is new. It answers as the environment's own prompt
asks, so the whole reply is the action: `prompt_template` of the class.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pkgutil
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .borrowed import History, OwnRandomness, facts_of, import_extra
from .contract import Observation, StepResult, TextEnvironment
from .textarena_games import STATE_KEYS
from .tools import HOW_TO_CALL, read_calls

SPLITS = ("train", "eval")


class VerifiersEnvironment(TextEnvironment):
    """A `verifiers.MultiTurnEnv` as a `TextEnvironment`.

    The whole completion, without its thought, is the action; the class says so by its `prompt_template`.

    Args:
        environment: passed to `verifiers.load_environment`; or `"module:function"`, or a function, that makes the
            environment.
        env_args: keyword arguments of that function.
        max_turns: maximum completions per episode. `None`: the environment's own limit. It must not exceed the
            trainer's, because an episode that the trainer ends is never scored.
        state_key: `"observation"`: the new messages. `"history"`: all messages so far.
        success_reward: reward from which an episode is a success. `None`: the environment's `pass_threshold`.

    Raises:
        ImportError: if verifiers is not installed, or its version has no `MultiTurnEnv`.
        ValueError: if the environment is not of this kind, has no end, or is scored by a judge or by groups.
    """

    prompt_template = "g2po_trl.rollout.tool_prompt:TOOL_PROMPT"  # by its name: rooms import in one direction

    def __init__(
        self,
        environment: str | Callable[..., Any],
        env_args: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        state_key: str = "observation",
        success_reward: float | None = None,
    ):
        if state_key not in STATE_KEYS:
            raise ValueError(f"state_key is {state_key!r}: choose one of {', '.join(STATE_KEYS)}")
        self.remembers = state_key == "history"
        self.name = environment if isinstance(environment, str) else environment.__name__
        self.randomness = OwnRandomness()
        with self.randomness.playing(0), _signal_handlers_kept():
            self.verifiers = import_extra("verifiers", "verifiers")
            if not hasattr(self.verifiers, "MultiTurnEnv"):
                raise ImportError(
                    f"verifiers {self.verifiers.__version__} has no MultiTurnEnv: "
                    'pip install "verifiers>=0.2.1,<0.4", the last versions that have it'
                )
            self.env = self._loaded(environment, dict(env_args or {}))
        self._check(max_turns)
        self.success_reward = self.env.pass_threshold if success_reward is None else success_reward
        self._client = _waiting_client()
        self._loop = asyncio.Runner()
        self._rollout: asyncio.Task | None = None

    def reset(
        self, example_id: int, split: str = "train", seed: int = 0, task_id: Any = None, task_type: Any = None
    ) -> Observation:
        """Start a row of the environment's own dataset.

        Args:
            example_id: number of the row.
            split: `"train"` or `"eval"`.
            seed: seed of the environment's random choices.
            task_id, task_type: not used here; names and groups the trajectories.

        Raises:
            ValueError: if there is no such row.
        """
        row = self._row(example_id, split)
        with self.randomness.playing(seed):
            self._abandon()
            self._rollout = self._loop.get_loop().create_task(self._play(row))
            asked = self._advance()
        if asked is None:
            why = self._rollout.result().get("stop_condition")
            raise RuntimeError(f"{self.name} ended before the model said anything ({why}): leave the row out")
        prompt, tools = asked
        told = [HOW_TO_CALL.format(tools="\n".join(map(_tool_line, tools)))] if tools else []
        text = "The task begins."
        self.history = History("")
        return Observation(text, self._key(text), task="\n\n".join([*told, *map(_shown, prompt)]))

    def step(self, action: str) -> StepResult:
        """Give the rollout its reply, and play on to the next question or the end."""
        if self._rollout is None:
            raise RuntimeError("no episode is played: call reset before step")
        with self.randomness.playing():
            self._client.answer(action)
            asked = self._advance()
        if asked is not None:
            text = _since_last_reply(asked[0])
            self.history.add(action, text)
            return StepResult(Observation(text, self._key(text)))
        rollout, self._rollout = self._rollout, None
        state = rollout.result()
        reward = float(state["reward"])
        info = {f"score_{name}": value for name, value in facts_of(state["metrics"] or {}).items()}
        info |= {"success": reward >= self.success_reward, "stop_condition": str(state.get("stop_condition"))}
        return StepResult(_since_last_reply(state["completion"] or []), reward, terminated=True, info=info)

    def close(self) -> None:
        """End the rollout that is played, then the event loop."""
        try:
            self._abandon()
        finally:
            self._loop.close()

    async def _play(self, row: Mapping[str, Any]) -> Any:
        """A rollout and its score.

        Raises:
            RuntimeError: when the environment or its rubric failed, of which the library makes a reward of 0.
        """
        state = await self.env.rollout(row, self._client, "model", {})
        if state.get("error") is not None:
            raise RuntimeError(f"{self.name} failed: {state['error']!r}") from state["error"]
        with _errors_logged("verifiers") as errors:
            await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        if errors:
            raise RuntimeError(f"the rubric of {self.name} failed: {errors[0]}")
        return state

    def _advance(self) -> tuple[list[Any], list[Any]] | None:
        """Let the rollout go on: the messages and tools of its next question, or `None` at its end."""

        async def wait() -> tuple[list[Any], list[Any]] | None:
            question = asyncio.ensure_future(self._client.questions.get())
            await asyncio.wait({self._rollout, question}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return question.result()
            question.cancel()
            return None

        asked = self._loop.run(wait())
        if asked is None and self._rollout.exception() is not None:
            rollout, self._rollout = self._rollout, None
            rollout.result()
        return asked

    def _abandon(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None and not rollout.done():
            rollout.cancel()

            async def ended() -> None:
                await asyncio.wait({rollout})

            self._loop.run(ended())
        self._client.begin()

    def _key(self, text: str) -> str:
        return self.history.key if self.remembers else text

    def _row(self, example_id: int, split: str) -> Mapping[str, Any]:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}: choose one of {', '.join(SPLITS)}")
        rows = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        if not 0 <= example_id < len(rows):
            raise ValueError(f"example_id is {example_id}: {self.name} has rows 0 to {len(rows) - 1} ({split})")
        return rows[example_id]

    def _loaded(self, environment: str | Callable[..., Any], env_args: dict[str, Any]) -> Any:
        if isinstance(environment, str) and ":" not in environment:
            return self.verifiers.load_environment(environment, **env_args)
        return (pkgutil.resolve_name(environment) if isinstance(environment, str) else environment)(**env_args)

    def _check(self, max_turns: int | None) -> None:
        env, name = self.env, self.name
        if not isinstance(env, self.verifiers.MultiTurnEnv):
            raise ValueError(f"{name} is a {type(env).__name__}, no MultiTurnEnv: of a group, load one of its members")
        if max_turns is not None:
            env.max_turns = max_turns
        if env.max_turns < 1:
            raise ValueError(
                f"max_turns is {max_turns}, and {name} sets no limit: pass the trainer's. The rubric scores an "
                "episode when it is over, and one that the trainer cuts off is never scored"
            )
        env.timeout_seconds = None  # the clock would run while the model and other episodes have their turn
        rubrics = _flat(env.rubric)
        if any(isinstance(r, self.verifiers.JudgeRubric) or "judge" in r.class_objects for r in rubrics):
            raise ValueError(
                f"the rubric of {name} asks a language model as a judge, which is not to be had here: make the "
                "environment with a rubric of functions"
            )
        if env.rubric.has_group_rewards:
            raise ValueError(
                f"the rubric of {name} scores groups of rollouts together, and here each is played by itself: make "
                "the environment with a rubric of functions of one rollout"
            )


def _waiting_client() -> Any:
    """A client of verifiers whose replies are given from outside. Made here: the library is imported late."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    async def unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this client has no server")

    class WaitingClient(Client):
        setup_client = to_native_tool = to_native_prompt = get_native_response = unused
        raise_from_native_response = from_native_response = unused

        def begin(self) -> None:
            self.questions: asyncio.Queue = asyncio.Queue()
            self.replies: asyncio.Queue = asyncio.Queue()

        def answer(self, reply: str) -> None:
            self.replies.put_nowait(reply)

        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs) -> Response:
            self.questions.put_nowait((prompt, tools or []))
            reply, calls = await self.replies.get(), []
            if tools:
                with contextlib.suppress(ValueError):  # a call that cannot be read is a reply without one
                    calls = read_calls(reply)
            message = ResponseMessage(
                content=None if calls else reply,
                tool_calls=[
                    ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))
                    for number, (name, arguments) in enumerate(calls)
                ]
                or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id=uuid.uuid4().hex, created=0, model=model, message=message)

        async def close(self) -> None:
            pass

    client = WaitingClient(None)
    client.begin()
    return client


def _flat(rubric: Any) -> list[Any]:
    """A rubric and those in it."""
    return [rubric, *(inner for part in getattr(rubric, "rubrics", []) for inner in _flat(part))]


def _tool_line(tool: Any) -> str:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps(about, ensure_ascii=False)


def _since_last_reply(messages: list[Any]) -> str:
    """What the environment said after the model's last reply."""
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return "\n\n".join(map(_text, messages[replies[-1] + 1 if replies else 0 :]))


def _shown(message: Any) -> str:
    return f"You: {_text(message)}" if message["role"] == "assistant" else _text(message)


def _text(message: Any) -> str:
    """A message's text; of an image or sound in it the kind alone."""
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return content or ""


@contextlib.contextmanager
def _errors_logged(name: str) -> Iterator[list[str]]:
    """What is logged as an error: a reward function that raises is no more than that to verifiers."""
    messages: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Noting(logging.ERROR)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """An environment of verifiers takes SIGINT and SIGTERM over; here they are the worker's."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
