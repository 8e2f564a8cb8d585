"""The expert of a file plays, for `g2po check`: its success within the turns of an episode, and its wording."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from ..agents.agent import is_agent
from ..engines.sampling import derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.several import environments_of
from ..environments.tasks import task_id_of
from ..environments.tools.trl_tools import default_history, text_environment_factory
from ..prompts.conversation import ChatResponse
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..trajectory import Step
from ..view.words import failure_kind
from .contract import Finding
from .examine import Extra
from .play import Played, RandomActor

FEW = 0.1  # of the expert's episodes
EPISODES = 4  # of each task: an expert may be random


@dataclass
class ExpertActor(RandomActor):
    """Actor whose answers come from an expert."""

    expert: Callable[[Episode, random.Random], Any] | None = None

    def _step(self, episode: Episode) -> Step | None:
        from g2po_trl.teach.experts import as_message, prose

        answer = self.expert(episode, self.rng)
        if answer is None:
            episode.give_up("no answer: the expert gave up")
            return None
        message, request = as_message(answer), episode.observation.request
        if request is None:
            return episode.step(prose(message), None)
        response = ChatResponse(message["content"], tuple(message.get("tool_calls", ())))
        return episode.step(response.to_action(), None, messages=list(request.messages))


def expert_findings(
    environment: Callable,
    expert: Callable[..., Any],
    tasks: Sequence[dict[str, Any]],
    limits: EpisodeLimits,
    pool_limits: PoolLimits,
    extra: Extra = (),
) -> list[Finding]:
    """Return an expert's success within the turns of `EPISODES` episodes per task; nothing for several environments.

    `extra`: functions that return further findings about its episodes.
    """
    from g2po_trl.teach.experts import ExpertEnvironment, agent_answer, carried_answer

    if environments_of(environment):
        return []
    factory = text_environment_factory(environment, limits, default_history(environment, None))
    rows = [dict(task) for task in tasks for _ in range(EPISODES)]
    if is_agent(environment):
        answer = partial(agent_answer, expert)
    else:
        answer, factory = carried_answer, partial(ExpertEnvironment, factory, expert)
        rows = [{"task_id": task_id_of(task), "task": task, "seed": derived_seed(0, n)} for n, task in enumerate(rows)]
    played = Played()
    actor = ExpertActor(played, random.Random(0), expert=answer)
    with EnvironmentPool(factory, replace(pool_limits, num_environment_workers=1)) as pool:
        for row in rows:
            (one,), _ = Player(pool, actor, limits).play([row], on_end=actor.ended)
            played.groups.append([one])
    won = [len(one.steps) for one in played.episodes if one.success]
    text = f"the expert succeeds in {len(won)} of {len(rows)} episodes within {limits.max_turns} turns"
    text += f", after {median(won):g} (median)" if won else ""
    reasons = sorted({failure_kind(one) for one in played.episodes if not one.success})
    why = f"{'; outcome of the others' if won else ''}: {', '.join(reasons[:3])}" if reasons else ""
    if len(won) < FEW * len(rows):
        remedy = (
            "g2po teach trains on successes alone, and a model hardly surpasses its expert: correct the expert or "
        )
        found = Finding("warning", text + why, f"{remedy}the reward, or raise max_turns.", is_final=True)
    elif won and median(won) >= limits.max_turns > 1 and reasons:
        remedy = "Raise max_turns: with one action more than the expert's, the episode fails."
        found = Finding("warning", text + why, remedy)
    else:
        found = Finding("ok", text + why)
    return [found, *(one for find in extra for one in find(played))]
