"""The first prompt of a task, as training makes it: by the same actor, whose engine generates nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import Sampling
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.setup import check_start, played_as
from ..environments.several import COLUMN, player_of
from ..environments.tasks import check_task_columns
from ..evaluation.agents import DirectAgent
from ..prompts.conversation import message_text
from ..prompts.template import PromptTemplate
from ..rollout.actor import PromptActor
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..utils.options import require


@dataclass
class FirstPrompt:
    """The first observation of a task, and how a model is asked. Raises `G2POError` if the environment fails.

    Args:
        environment_factory: as passed to the trainer.
        task: a dataset row.
        turns: the maximum of an episode.
        prompt_template: as passed to the trainer.
        settings: `history`, `max_prompt_length` and `chat_template_kwargs` of the training run, each optional.
    """

    environment_factory: Callable
    task: Mapping[str, Any]
    turns: int
    prompt_template: PromptTemplate | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.episode = Episode("task")
        template = self.prompt_template and self.prompt_template.of(self.task.get(COLUMN))
        made, task = player_of(self.environment_factory, self.task)
        playing = played_as(made, EpisodeLimits(self.turns), template, self.settings.get("history"))
        factory, self.template, self.history = playing
        check_task_columns(factory, task)
        with EnvironmentPool(factory, PoolLimits(num_environment_workers=1)) as pool:
            self.episode.open(*check_start(pool, [task]))
        request = DirectAgent(self.template, history=self.history).ask(self.episode)
        self.messages, self.tools = request.messages, request.tools

    def tokens_for(self, model: str) -> tuple[list[int], str]:
        """Return the prompt's token ids and text for a model. Raises `G2POError` for one that cannot read it."""
        from ..engines.base import Engine  # with torch, which is slow to import
        from ..engines.stop_tokens import get_stop_token_ids_of_checkpoint
        from ..prompts.images import load_processing_class, reads_images
        from ..prompts.tokenization import ChatEncoder

        encode = ChatEncoder(load_processing_class(model), self.settings.get("chat_template_kwargs"))
        tokenizer, reads = encode.tokenizer, reads_images(encode.processing_class)
        engine = Engine(tokenizer, get_stop_token_ids_of_checkpoint(tokenizer, model))
        engine.reads_text_because = None if reads else f"{model} reads only text: pass another"
        limits = {"history": self.history, "max_prompt_length": self.settings.get("max_prompt_length")}
        session = PromptActor(engine, encode, self.template, **limits).session(Sampling(), None, RolloutStats())
        session.ask([self.episode])
        why = f"the first prompt ends the episode: {self.episode.failure_reason or self.episode.error}"
        require(bool(session.asked), "model", model, why)
        ids = list(session.asked[self.episode.number].prompt.ids)
        return ids, tokenizer.decode(ids)

    def text(self, model: str | None = None) -> str:
        """Return the prompt with its length; with a model, as its chat template renders it."""
        if model is not None:
            ids, text = self.tokens_for(model)
            return f"{text}\n--- {len(ids)} tokens ---"
        texts = [f"--- {message['role']} ---\n{message_text(message)}" for message in self.messages]
        texts += [f"--- tools ---\n{json.dumps(self.tools, ensure_ascii=False, indent=2)}"] if self.tools else []
        return "\n".join([*texts, f"--- {sum(len(m['content']) for m in self.messages)} characters ---"])
