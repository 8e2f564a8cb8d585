"""Costs of a rollout: times, tokens, turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest


@dataclass
class RolloutStats:
    """Costs of a rollout.

    Args:
        environment_time: seconds spent waiting for environments.
        generation_time: seconds spent generating.
        prompt_time: seconds spent building prompts.
        total_time: seconds in all.
        turns: turns of the longest episode.
        parts: (turns of the longest episode, episodes) of each part of the rollout; parts follow one another.
        num_steps: steps of all episodes.
        truncated_prompts: steps whose prompt lost history or text.
        truncated_completions: completions that reached `max_completion_length`.
        generated_tokens, prompt_tokens: tokens of all completions, and of all prompts.
        cacheable_tokens: prompt tokens for which the engine reports its prefix cache.
        cached_tokens: number of these tokens that the cache held.
        later_prompts: prompts of conversations after the first completion of their episode.
        continued_prompts: number of these prompts that begin with the ids of an earlier prompt and its completion.
    """

    environment_time: float = 0.0
    generation_time: float = 0.0
    prompt_time: float = 0.0
    total_time: float = 0.0
    turns: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    num_steps: int = 0
    truncated_prompts: int = 0
    truncated_completions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cacheable_tokens: int = 0
    cached_tokens: int = 0
    later_prompts: int = 0
    continued_prompts: int = 0

    @classmethod
    def over_ranks(cls, stats: Sequence[RolloutStats]) -> RolloutStats:
        """Return the sums of the ranks' counts, and the largest times and turns, since ranks wait for the slowest."""
        parts = zip_longest(*(one.parts for one in stats), fillvalue=(0, 0))
        together = tuple((max(turns for turns, _ in part), sum(number for _, number in part)) for part in parts)
        return replace(cls._joined(stats, largest=("turns", "_time")), parts=together)

    def and_then(self, other: RolloutStats) -> RolloutStats:
        """Return the stats of this rollout followed by another."""
        return replace(self._joined([self, other], largest=("turns",)), parts=self.parts + other.parts)

    @classmethod
    def _joined(cls, stats: Sequence[RolloutStats], largest: tuple[str, ...]) -> RolloutStats:
        """Return sums, and the largest of the fields whose names end so."""
        names = [one.name for one in fields(cls) if one.name != "parts"]
        joined = {name: max if name.endswith(largest) else sum for name in names}
        return cls(**{name: join(getattr(one, name) for one in stats) for name, join in joined.items()})

    @property
    def active_fraction(self) -> float:
        """Fraction of (episode, turn) places with a running episode."""
        return self.num_steps / max(1, sum(turns * number for turns, number in self.parts))

    def metrics(self) -> dict[str, float]:
        """Return `time/*` in seconds and `rollout/*`."""
        cache = {}
        if self.cacheable_tokens:
            cache["rollout/prefix_cache_hit_fraction"] = self.cached_tokens / self.cacheable_tokens
        if self.later_prompts:
            cache["rollout/continued_prompt_fraction"] = self.continued_prompts / self.later_prompts
        return {
            "time/rollout": self.total_time,
            "time/environment": self.environment_time,
            "time/generation": self.generation_time,
            "time/prompts": self.prompt_time,
            "rollout/active_fraction": self.active_fraction,
            "rollout/steps": self.num_steps,
            "rollout/prompt_tokens": self.prompt_tokens,
            "rollout/completion_tokens": self.generated_tokens,
            "rollout/truncated_prompts": self.truncated_prompts,
            "rollout/truncated_completions": self.truncated_completions,
            "rollout/mean_prompt_tokens": self.prompt_tokens / max(1, self.num_steps),
            "rollout/mean_completion_tokens": self.generated_tokens / max(1, self.num_steps),
            **cache,
        }
