"""What a rollout cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass
class RolloutStats:
    """Costs of a rollout.

    Args:
        environment_time: seconds spent waiting for environments.
        generation_time: seconds spent generating.
        prompt_time: seconds spent building prompts.
        total_time: seconds in all.
        turns: turns of the longest episode.
        live_steps: steps of all episodes.
        truncated_prompts: steps whose prompt lost history or text.
        truncated_replies: completions that reached `max_tokens`.
        generated_tokens, prompt_tokens: tokens of all completions, and of all prompts.
        tokenized_tokens: prompt tokens that the tokenizer produced; the others were known from earlier prompts.
        cacheable_tokens: prompt tokens for which the engine reports its prefix cache.
        cached_tokens: of these, tokens that the cache held.
    """

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
        return cls._joined(stats, {"environment_time", "generation_time", "prompt_time", "total_time", "turns"})

    def and_then(self, other: RolloutStats) -> RolloutStats:
        """Of two rollouts, one after the other."""
        return self._joined([self, other], {"turns"})

    @classmethod
    def _joined(cls, stats: Sequence[RolloutStats], largest: set[str]) -> RolloutStats:
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
