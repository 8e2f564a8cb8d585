"""The multi-turn loop: many episodes at once, one reply and one action a turn, live episodes only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .environment import Observation
from .environment_pool import EnvironmentFailure, EnvironmentPool
from .prompting import FittedPrompt, PromptTemplate, PromptTooLongError, fit_prompt
from .trajectory import Step, Trajectory

if TYPE_CHECKING:
    from .generation import Reply


@dataclass
class RolloutStats:
    """What a rollout cost. Times in seconds."""

    environment_time: float = 0.0
    generation_time: float = 0.0
    prompt_time: float = 0.0
    total_time: float = 0.0
    turns: int = 0
    live_steps: int = 0
    truncated_prompts: int = 0
    truncated_replies: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0

    @classmethod
    def over_ranks(cls, stats: Sequence[RolloutStats]) -> RolloutStats:
        """Counts are summed; of times and turns the largest counts: all wait for the slowest rank."""
        largest = {"environment_time", "generation_time", "prompt_time", "total_time", "turns"}
        return cls(
            **{f.name: (max if f.name in largest else sum)(getattr(s, f.name) for s in stats) for f in fields(cls)}
        )

    def active_fraction(self, num_episodes: int) -> float:
        """Share of (episode, turn) places in which an episode was live."""
        return self.live_steps / max(1, self.turns * num_episodes)

    def metrics(self, num_episodes: int) -> dict[str, float]:
        """`time/*` in seconds and `rollout/*`."""
        return {
            "time/rollout": self.total_time,
            "time/environment": self.environment_time,
            "time/generation": self.generation_time,
            "time/prompts": self.prompt_time,
            "rollout/active_fraction": self.active_fraction(num_episodes),
            "rollout/truncated_prompts": self.truncated_prompts,
            "rollout/truncated_replies": self.truncated_replies,
            "rollout/mean_prompt_tokens": self.prompt_tokens / max(1, self.live_steps),
            "rollout/mean_reply_tokens": self.generated_tokens / max(1, self.live_steps),
        }


@dataclass
class _Episode:
    task_id: str
    observation: Observation | None = None
    task: str = ""
    steps: list[Step] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)
    reward: float = 0.0
    outcome: str | None = None
    error: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def fail(self, failure: EnvironmentFailure) -> None:
        self.outcome, self.error = "error", f"{failure.kind}: {failure.message}"

    def trajectory(self) -> Trajectory:
        final = self.observation.text if self.observation else None
        # An episode without an outcome ran out of turns.
        return Trajectory(
            self.task_id, self.steps, self.reward, self.outcome or "truncated", final, self.error, self.info
        )


class ChatEncoder:
    """Chat messages -> token ids and text, by the tokenizer's chat template."""

    def __init__(self, tokenizer, chat_template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.kwargs = chat_template_kwargs or {}

    def text(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.kwargs)

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], text

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def run_episodes(
    pool: EnvironmentPool,
    generate: Callable[[list[list[int]]], list[Reply]],
    encode: ChatEncoder,
    template: PromptTemplate,
    tasks: Sequence[dict[str, Any]],
    task_ids: Sequence[str],
    groups: Sequence[int],
    max_turns: int,
    history_length: int,
    max_prompt_length: int | None,
    any_live: Callable[[bool], bool] = bool,
    on_turn: Callable[[int, int], None] | None = None,
) -> tuple[list[Trajectory], RolloutStats]:
    """Play one episode of each task, all at once.

    Args:
        generate: prompts' token ids -> replies.
        tasks: keyword arguments of `reset`, one dict an episode.
        task_ids, groups: names the task, and the group, of each episode.
        any_live: this rank has live episodes -> any rank has. With a sharded model every rank must go on generating
            until all are done; otherwise it is the identity.
        on_turn: called after each turn with (turn, live episodes).

    Returns:
        One trajectory a task, in order. Environment failures are data: such a trajectory has outcome `"error"`.
    """
    started = time.perf_counter()
    stats = RolloutStats()
    episodes = [_Episode(task_id) for task_id in task_ids]
    for episode, observation in zip(episodes, pool.reset(tasks, groups)):
        if isinstance(observation, EnvironmentFailure):
            episode.fail(observation)
        else:
            episode.observation, episode.task = observation, observation.task or ""
    stats.environment_time += time.perf_counter() - started

    while stats.turns < max_turns:
        live = [slot for slot, episode in enumerate(episodes) if episode.outcome is None]
        if not any_live(bool(live)):
            break
        clock = time.perf_counter()
        built = _build_prompts([episodes[slot] for slot in live], encode, template, history_length, max_prompt_length)
        live = [slot for slot, prompt in zip(live, built) if prompt is not None]
        prompts = [prompt for prompt in built if prompt is not None]
        stats.prompt_time += time.perf_counter() - clock

        clock = time.perf_counter()
        replies = generate([prompt.ids for prompt in prompts])
        stats.generation_time += time.perf_counter() - clock

        actions = {
            slot: _record_step(episodes[slot], prompt, reply, encode, template)
            for slot, prompt, reply in zip(live, prompts, replies)
        }
        clock = time.perf_counter()
        results = pool.step(actions) if actions else {}
        stats.environment_time += time.perf_counter() - clock
        for slot, result in results.items():
            _advance(episodes[slot], result, actions[slot])

        stats.turns += 1
        stats.live_steps += len(live)
        stats.truncated_prompts += sum(prompt.truncated for prompt in prompts)
        stats.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        stats.generated_tokens += sum(len(reply.ids) for reply in replies)
        stats.truncated_replies += sum(not reply.complete for reply in replies)
        if on_turn:
            on_turn(stats.turns, sum(episode.outcome is None for episode in episodes))
    stats.total_time = time.perf_counter() - started
    return [episode.trajectory() for episode in episodes], stats


def _build_prompts(
    episodes: Sequence[_Episode],
    encode: ChatEncoder,
    template: PromptTemplate,
    history_length: int,
    max_prompt_length: int | None,
) -> list[FittedPrompt | None]:
    """The prompts of live episodes. One that cannot be made to fit ends its episode as an error: `None`."""
    arguments = [
        {
            "observation": episode.observation.text,
            "task": episode.task,
            "admissible_actions": episode.observation.admissible_actions,
            "history": episode.history[-history_length:] if history_length else [],
            "steps_taken": len(episode.steps),
        }
        for episode in episodes
    ]
    if not arguments:
        return []
    texts = [encode.text(template.messages(**kwargs)) for kwargs in arguments]
    encoded = encode.tokenizer(texts, add_special_tokens=False)["input_ids"]  # one call for all is much faster
    prompts: list[FittedPrompt | None] = []
    for episode, ids, text, kwargs in zip(episodes, encoded, texts, arguments):
        if max_prompt_length is None or len(ids) <= max_prompt_length:
            prompts.append(FittedPrompt(ids, text, False))
            continue
        try:
            prompts.append(fit_prompt(template, encode, max_prompt_length, **kwargs))
        except PromptTooLongError as error:
            episode.outcome, episode.error = "error", f"prompt: {error}"
            prompts.append(None)
    return prompts


def _record_step(
    episode: _Episode, prompt: FittedPrompt, reply: Reply, encode: ChatEncoder, template: PromptTemplate
) -> str:
    """Write the step down; returns the action to play."""
    text = encode.decode(reply.ids)
    action, valid = template.parse_reply(text, prompt.text[-64:])
    seen = episode.observation
    episode.steps.append(
        Step(
            observation=seen.text,
            action=action,
            valid=valid,
            state_key=seen.state_key,
            reply=text,
            admissible_actions=seen.admissible_actions,
            prompt_ids=prompt.ids,
            completion_ids=reply.ids,
            logprobs=reply.logprobs,
            prompt_truncated=prompt.truncated,
            completion_truncated=not reply.complete,
        )
    )
    return action


def _advance(episode: _Episode, result, action: str) -> None:
    if isinstance(result, EnvironmentFailure):
        episode.fail(result)
        return
    episode.history.append((episode.observation.text, action))
    episode.observation = result.observation
    episode.steps[-1].reward = result.reward
    episode.reward += result.reward
    if result.terminated or result.truncated:
        episode.info = result.info
        if result.terminated:
            success = result.info.get("success", episode.reward > 0)
            episode.outcome = "success" if success else "failure"
        else:
            episode.outcome = "truncated"
