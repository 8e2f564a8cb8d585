"""Episodes played by a policy: each turn one prompt, one reply and one action of every live episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..environments.pool import EnvironmentPool
from ..trajectory import Step, Trajectory
from .encoding import ChatEncoder
from .episodes import Episode, play_turns
from .prompting import FittedPrompt, PromptTemplate, PromptTooLongError, fit_prompt
from .sampling import derived_seed

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
    tokenized_tokens: int = 0
    # Of the prompts for which the engine says what its prefix cache held: all tokens, and those.
    cacheable_tokens: int = 0
    cached_tokens: int = 0

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
        """`time/*` in seconds and `rollout/*`. That of the prefix cache only if its engine tells."""
        cache = {}
        if self.cacheable_tokens:
            cache["rollout/prefix_cache_hit_fraction"] = self.cached_tokens / self.cacheable_tokens
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
            "rollout/tokenized_fraction": self.tokenized_tokens / max(1, self.prompt_tokens),
            **cache,
        }


def run_episodes(
    pool: EnvironmentPool,
    generate: Callable[..., list[Reply]],
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
    overlap: bool = False,
    seeds: Sequence[int] | None = None,
) -> tuple[list[Trajectory], RolloutStats]:
    """Play one episode of each task, all at once.

    Args:
        generate: prompts' token ids -> replies; with `seeds`, prompts' token ids and a seed for each -> replies.
        tasks: keyword arguments of `reset`, one dict an episode.
        task_ids, groups: names the task, and the group, of each episode.
        any_live: this rank has live episodes -> any rank has. With a sharded model every rank must go on generating
            until all are done; otherwise it is the identity.
        on_turn: called after each turn with (turn, live episodes).
        overlap: environments work while the other half of the episodes is asked for its actions.
        seeds: one an episode; a request's follows from it and the turn.

    Returns:
        One trajectory a task, in order. Environment failures are data: such a trajectory has outcome `"error"` or
        `"lost"`.
    """
    started = time.perf_counter()
    stats = RolloutStats()

    prompts: dict[int, FittedPrompt] = {}
    encode.forget()

    def prepare(live: list[Episode]) -> None:
        clock = time.perf_counter()
        tokenized = encode.tokenized
        prompts.update(_build_prompts(live, encode, template, history_length, max_prompt_length))
        stats.tokenized_tokens += encode.tokenized - tokenized
        stats.prompt_time += time.perf_counter() - clock

    def act(live: list[Episode]) -> list[Step]:
        read = [prompts.pop(episode.number) for episode in live]
        clock = time.perf_counter()
        ids = [prompt.ids for prompt in read]
        if seeds is None:
            replies = generate(ids)
        else:
            replies = generate(ids, [derived_seed(seeds[episode.number], len(episode.steps)) for episode in live])
        stats.generation_time += time.perf_counter() - clock
        stats.truncated_prompts += sum(prompt.truncated for prompt in read)
        stats.prompt_tokens += sum(len(prompt.ids) for prompt in read)
        stats.generated_tokens += sum(len(reply.ids) for reply in replies)
        stats.truncated_replies += sum(not reply.complete for reply in replies)
        for prompt, reply in zip(read, replies):
            if reply.cached_tokens is not None:
                stats.cacheable_tokens += len(prompt.ids)
                stats.cached_tokens += reply.cached_tokens
        return [_make_step(*row, encode, template) for row in zip(live, read, replies)]

    trajectories, cost = play_turns(
        pool, act, tasks, task_ids, groups, max_turns, any_live, on_turn, prepare=prepare, overlap=overlap
    )
    stats.turns, stats.live_steps, stats.environment_time = cost.turns, cost.live_steps, cost.environment_time
    stats.total_time = time.perf_counter() - started
    return trajectories, stats


def _build_prompts(
    episodes: Sequence[Episode],
    encode: ChatEncoder,
    template: PromptTemplate,
    history_length: int,
    max_prompt_length: int | None,
) -> dict[int, FittedPrompt]:
    """The prompts of episodes, by their numbers. One that cannot be made to fit ends its episode as a failure."""
    arguments = [prompt_contents(episode, history_length) for episode in episodes]
    texts = [encode.text(template.messages(**kwargs)) for kwargs in arguments]
    prompts = {}
    for episode, ids, text, kwargs in zip(episodes, encode.ids(texts), texts, arguments):
        if max_prompt_length is None or len(ids) <= max_prompt_length:
            prompts[episode.number] = FittedPrompt(ids, text, False)
            continue
        try:
            prompts[episode.number] = fit_prompt(template, encode, max_prompt_length, **kwargs)
        except PromptTooLongError as error:
            episode.give_up(f"prompt too long: {error}")
    return prompts


def prompt_contents(episode: Episode, history_length: int) -> dict[str, Any]:
    """What `PromptTemplate.messages` is told of an episode."""
    return {
        "observation": episode.observation.text,
        "task": episode.task,
        "admissible_actions": episode.observation.admissible_actions,
        "history": episode.history[-history_length:] if history_length else [],
        "steps_taken": len(episode.steps),
    }


def _make_step(
    episode: Episode, prompt: FittedPrompt, reply: Reply, encode: ChatEncoder, template: PromptTemplate
) -> Step:
    text = encode.decode(reply.ids)
    action, valid = template.read(text, prompt.text[-64:], episode.observation.admissible_actions)
    return episode.step(
        action,
        text,
        valid=valid,
        prompt_ids=prompt.ids,
        completion_ids=reply.ids,
        logprobs=reply.logprobs,
        prompt_truncated=prompt.truncated,
        completion_truncated=not reply.complete,
    )
