"""The first prompt of a task, as training makes it: by the same actor, whose engine generates nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engines.sampling import Sampling
from ..environments.episode_limits import EpisodeLimits
from ..environments.failures import describe_failure
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.setup import played_as
from ..environments.several import COLUMN, environments_of, player_of
from ..environments.tasks import check_task_columns
from ..evaluation.agents import DirectAgent
from ..prompts.conversation import message_text, pictures_of
from ..prompts.template import PromptTemplate
from ..rollout.actor import PromptActor
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..utils.errors import G2POError
from ..utils.options import require


@dataclass
class FirstPrompt:
    """The first observation of a task, and how a model is asked.

    Args:
        episode: an episode that has begun.
        agent: the prompts of training, before a model's chat template.
        settings: settings of the training run for prompts: `history_length`, `max_prompt_length`,
            `chat_template_kwargs`, each optional.
    """

    episode: Episode
    agent: DirectAgent
    settings: Mapping[str, Any]

    def __post_init__(self):
        request = self.agent.ask(self.episode, ())
        self.messages, self.tools = request.messages, request.tools

    @classmethod
    def of(
        cls,
        environment_factory: Callable,
        task: Mapping[str, Any],
        turns: int,
        prompt_template: PromptTemplate | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> FirstPrompt:
        """Reset the environment in a worker. Raises `G2POError` if that fails.

        `environment_factory` and `prompt_template` are as passed to the trainer, `task` is a dataset row, `turns` the
        maximum of an episode. For `settings` see the class; `history`: as in `G2POConfig`.
        """
        settings = settings or {}
        if prompt_template is not None and environments_of(environment_factory):
            prompt_template = prompt_template.of(task.get(COLUMN))
        environment_factory, task = player_of(environment_factory, task)
        limits, history = EpisodeLimits(turns), settings.get("history")
        factory, template, history = played_as(environment_factory, limits, prompt_template, history)
        check_task_columns(factory, task)
        with EnvironmentPool(factory, PoolLimits(num_environment_workers=1)) as pool:
            (first,) = pool.reset([task])
        if isinstance(first, EnvironmentFailure):
            raise G2POError(f"the environment {describe_failure(first)}", "reset", task)
        episode = Episode("task")
        episode.open(first)
        return cls(episode, DirectAgent(template, history=history), settings)

    def tokens_for(self, model: str) -> tuple[list[int], str]:
        """Return the prompt's token ids and text for a model, a folder or a Hub id.

        Raises:
            G2POError: for a model without a chat template, or a prompt that is too long.
        """
        from transformers import AutoProcessor, AutoTokenizer  # slow to import

        from ..engines.base import Engine
        from ..engines.stop_tokens import get_stop_token_ids_of_checkpoint
        from ..prompts.chat_template import get_chat_template, get_tokenizer
        from ..prompts.images import reads_images
        from ..prompts.tokenization import ChatEncoder

        kind = AutoProcessor if pictures_of(self.messages) else AutoTokenizer
        processing_class = kind.from_pretrained(model, padding_side="left")
        has_template = get_chat_template(processing_class) is not None
        require(has_template, "model", model, "its tokenizer has no chat template; pass another")
        names = {"history_length", "max_prompt_length"} & self.settings.keys()
        tokenizer = get_tokenizer(processing_class)
        engine = Engine(tokenizer, get_stop_token_ids_of_checkpoint(tokenizer, model))
        engine.reads_text_because = (
            None if reads_images(processing_class) else f"{model} reads only text: pass another"
        )
        encode = ChatEncoder(processing_class, self.settings.get("chat_template_kwargs"))
        lengths = {name: self.settings[name] for name in names}
        actor = PromptActor(engine, encode, self.agent.template, history=self.agent.history, **lengths)
        session = actor.session(Sampling(), None, RolloutStats())
        session.ask([self.episode])
        why = self.episode.failure_reason or self.episode.error
        require(bool(session.asked), "model", model, f"the first prompt ends the episode: {why}")
        prompt = session.asked[self.episode.number].prompt
        return list(prompt.ids), tokenizer.decode(prompt.ids)

    def text(self, model: str | None = None) -> str:
        """Return the prompt with its length; with a model, as its chat template renders it."""
        if model is not None:
            ids, text = self.tokens_for(model)
            return f"{text}\n--- {len(ids)} tokens ---"
        texts = [f"--- {message['role']} ---\n{message_text(message)}" for message in self.messages]
        texts += [f"--- tools ---\n{json.dumps(self.tools, ensure_ascii=False, indent=2)}"] if self.tools else []
        return "\n".join([*texts, f"--- {sum(len(m['content']) for m in self.messages)} characters ---"])
