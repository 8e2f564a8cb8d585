"""Examine an environment or an agent before training: play it in worker processes and return findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..agents.agent import is_agent
from ..engines.sampling import Sampling, derived_seed
from ..environments.contract import Observation, TextEnvironment
from ..environments.episode_limits import EpisodeLimits
from ..environments.failures import describe_failure
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.setup import first_steps
from ..environments.several import COLUMN, check_limits, check_mixture, environments_of
from ..environments.tools.trl_tools import default_history, played_as, text_environment_factory
from ..environments.validation import check_task_columns, player_of
from ..prompts.template import PromptTemplate
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..utils.errors import G2POError
from .contract import LEVELS, Finding
from .findings import (
    PASS_KEY,
    agent_failures,
    agent_findings,
    completion_findings,
    constant,
    counting,
    hints,
    length,
    limits_reached,
    outcome_finding,
    recurrence,
    recurrence_by_key,
    replayed,
    speed,
    tool_limit,
)
from .play import TEXTS, Played, play_at_random, probe, probed

Extra = Sequence[Callable[[Played], list[Finding]]]

if TYPE_CHECKING:
    from ..evaluation.chat_models import ChatCompletion, ChatModel


def examine(
    environment_factory: Callable[[], TextEnvironment],
    tasks: Sequence[dict[str, Any]],
    episodes: int = 8,
    turns: int = 30,
    seed: int = 0,
    limits: PoolLimits | None = None,
    episode_limits: EpisodeLimits | None = None,
    extra: Extra = (),
    texts: Sequence[str] = TEXTS,
    state_key_ignores: Sequence[str] | None = None,
) -> list[Finding]:
    """Return the findings of random episodes of an environment or an agent in worker processes, the worst first.

    Several environments are examined one by one, each with its own tasks.

    Args:
        environment_factory: as passed to the trainer; for an agent, as `agent_factory` makes it.
        tasks: dataset rows.
        episodes: episodes per task, e.g. the group size.
        turns: maximum turns of an episode.
        seed: seed of the random actions.
        limits: limits of environment workers, as for `EnvironmentPool`; one worker plays.
        episode_limits: limits of an episode, in addition to `turns`.
        extra: functions that return further findings about the episodes.
        texts: an agent's random responses without tool calls.
        state_key_ignores: details that keys leave out, as in training.
    """
    of_episodes = replace(episode_limits or EpisodeLimits(), max_turns=turns)
    how = episodes, seed, replace(PoolLimits.of(limits), num_environment_workers=1), extra, texts, state_key_ignores

    def find(factory: Callable, rows: Sequence[dict[str, Any]], own: EpisodeLimits, name: str | None) -> list[Finding]:
        try:
            return (_examine_agent if is_agent(factory) else _examine_environment)(factory, rows, own, *how)
        except ValueError as error:  # e.g. tools without a description, variables that are not set
            return [Finding("error", str(error))]

    try:
        return _of_each(environment_factory, tasks, of_episodes, find)
    except G2POError as error:  # of several environments: a task of none of them, limits of another
        return [Finding("error", str(error))]


def try_model(
    environment_factory: Callable,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    chat: ChatModel,
    sampling: Sampling,
    settings: Any,
    prompt_template: PromptTemplate | None = None,
    limits: PoolLimits | None = None,
    episode_limits: EpisodeLimits | None = None,
    extra: Extra = (),
    state_key_ignores: Sequence[str] | None = None,
) -> list[Finding]:
    """Return the findings of episodes that a model plays concurrently, with the prompts of training, the worst first.

    Args:
        environment_factory: as in `examine`.
        tasks: dataset rows.
        episodes: episodes per task.
        turns: maximum turns of an episode.
        chat: the model.
        sampling: how completions are sampled.
        settings: an object with `history`, `history_length` and `max_prompt_length`; the last is not for servers.
        prompt_template: as passed to the trainer.
        limits: as in `examine`.
        episode_limits: as in `examine`.
        extra: as in `examine`.
        state_key_ignores: as in `examine`.

    Raises:
        G2POError: if a server rejects requests or cannot be reached, or a task has no known environment.
    """

    from ..evaluation.actors import make_actor  # transformers: for episodes with a model alone
    from ..evaluation.agents import DirectAgent

    def find(factory: Callable, rows: Sequence[dict[str, Any]], own: EpisodeLimits, name: str | None) -> list[Finding]:
        played, lengths = Played(), []

        def count(episode: Episode, completion: ChatCompletion) -> None:
            played.note(episode.observation, is_first=not episode.steps)
            lengths.append((completion.prompt_tokens, completion.completion_tokens))

        wording = prompt_template and prompt_template.of(name)
        played_factory, template, history = played_as(factory, own, wording, settings.history)
        agent = DirectAgent(template, settings.history_length, settings.max_prompt_length, history)
        repeated = [task for task in rows for _ in range(episodes)]
        groups = [number // episodes for number in range(len(repeated))]
        seeds = [derived_seed(0, number) for number in range(len(repeated))]
        with EnvironmentPool(played_factory, limits) as pool:
            player = Player(pool, make_actor(chat, agent, count=count), own)
            trajectories, _ = player.play(repeated, sampling, groups, seeds)
        played.fail(trajectories)
        for start in range(0, len(repeated), episodes):
            played.groups.append([one for one in trajectories[start : start + episodes] if one.counted])
        played.ignore(state_key_ignores)
        return _findings_of_model(factory, played, lengths, episodes, own.max_turns, extra)

    of_episodes = replace(episode_limits or EpisodeLimits(), max_turns=turns)
    return _of_each(environment_factory, tasks, of_episodes, find)


def of_several(found: Mapping[str, Sequence[Finding]], limits: EpisodeLimits) -> list[Finding]:
    """Return the findings of environments, each after its environment's name; final only if all have a final one.

    The remedy for too few turns names the option that sets them in `limits`.
    """
    nothing = all(any(one.is_final for one in some) for some in found.values())
    places = dict.fromkeys(found, "--max-turns")
    for name, own in (limits.environment_limits or {}).items():
        places |= {name: f"max_turns in environment_limits[{name!r}]"} if "max_turns" in own else {}
    return [
        replace(
            one,
            text=f"{name}: {one.text}",
            remedy=one.remedy.replace("--max-turns", places[name]),
            is_final=one.is_final and nothing,
        )
        for name, some in found.items()
        for one in some
    ]


def _of_each(
    environment_factory: Callable, tasks: Sequence[dict[str, Any]], limits: EpisodeLimits, find: Callable
) -> list[Finding]:
    """Return the findings of `find(factory, tasks, limits, name)` for each environment, the worst first."""
    if environments := environments_of(environment_factory):
        check_limits(limits, environment_factory)
        check_mixture(environment_factory, {"check": tasks})
        found = {}
        for name, one in environments.items():
            rows = [dict(player_of(environment_factory, task)[1]) for task in tasks if task[COLUMN] == name]
            found[name] = find(one, rows, limits.by(name), name)
        findings = of_several(found, limits)
    else:
        findings = find(environment_factory, tasks, limits, None)
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def _examine_agent(factory, tasks, limits, episodes, seed, pool_limits, extra, texts, ignores) -> list[Finding]:
    """Return findings about an agent's calls and failures, and about states that recur."""
    has_own_key = factory.keywords.get("state_key") is not None
    factory = text_environment_factory(factory, limits)
    with EnvironmentPool(factory, pool_limits) as pool, EnvironmentPool(factory, pool_limits) as second:
        played = play_at_random(pool, tasks, episodes, limits, seed, texts)
        findings = [*agent_failures(played), *limits_reached(played), *tool_limit(played, limits)]
        if not played.episodes:
            return findings
        again = [] if played.failures else [replayed(second, tasks, played)]
        played.ignore(ignores)
        findings += [*agent_findings(played, limits.max_turns), *speed(played, "a call of the model"), *length(played)]
        findings += [*recurrence(played, episodes, PASS_KEY), *recurrence_by_key(played, has_own_key)]
        findings += [finding for find in extra for finding in find(played)]
        if played.has_tools or texts is not TEXTS:  # of words that it does not understand nothing is expected
            findings.append(outcome_finding(played.episodes, limits.max_turns, "random responses"))
        return findings + again


def _examine_environment(factory, tasks, limits, episodes, seed, pool_limits, extra, texts, ignores) -> list[Finding]:
    """Return findings about the contract, and about whether a model can learn in the environment."""
    patient = replace(pool_limits, environment_reset_timeout=10 * pool_limits.environment_reset_timeout)
    factory = text_environment_factory(factory, limits, default_history(factory, None))
    findings, tasks = _check_columns(factory, tasks)
    if tasks:
        with EnvironmentPool(factory, pool_limits) as pool, EnvironmentPool(probed(factory), patient) as second:
            findings += _examine(pool, second, tasks, episodes, limits, seed, extra, ignores)
    return findings


def _check_columns(environment_factory: Callable, tasks: Sequence[dict[str, Any]]) -> tuple[list[Finding], list[dict]]:
    """Return findings about tasks that do not fit `reset`, and the tasks that do."""
    findings, fitting = [], []
    for number, task in enumerate(tasks, 1):
        try:
            check_task_columns(environment_factory, task)
            fitting.append(task)
        except ValueError as error:
            findings.append(Finding("error", f"task {number}: {error}" if len(tasks) > 1 else str(error)))
    return findings, fitting


def _examine(pool, second, tasks, episodes, limits, seed, extra, ignores) -> list[Finding]:
    turns = limits.max_turns
    starts, failures = first_steps(pool, tasks, tasks)
    playable = [task for task, start in zip(tasks, starts) if isinstance(start, Observation)]
    failed = [Finding("error", f"in a worker process it {describe_failure(one)}") for one in failures]
    if any(failure.kind in ("timeout", "crash") for failure in failures):
        return failed[:1]
    played = play_at_random(second, playable, episodes, limits, seed, TEXTS)
    for one in played.failures:
        remedy = "Return an observation instead of raising." if one.kind == "exception" else ""
        failed.append(Finding("error", f"a random episode {describe_failure(one)}", remedy))
    if played.takes_long:
        return failed[-1:]
    findings = [finding for task in tasks for finding in probe(second, task, turns)]
    findings += [*limits_reached(played), *tool_limit(played, limits)]
    if not any(finding.level == "error" for finding in findings):
        findings += failed
    if played.steps:
        findings += [*speed(played, "a step"), *length(played), *hints(played)]
    if any(finding.level == "error" for finding in findings):
        return findings
    findings.append(Finding("ok", "keeps the contract of reset, step and close, also for invalid actions"))
    findings.append(replayed(pool, playable, played))
    played.ignore(ignores)
    findings += [finding for find in extra for finding in find(played)]
    if played.has_tools or played.lists_actions:
        return [*findings, *recurrence(played, episodes), outcome_finding(played.episodes, turns)]
    return findings + constant(played) + counting(played)


def _findings_of_model(factory, played, lengths, episodes, turns, extra) -> list[Finding]:
    by_agent = is_agent(factory)
    findings = agent_failures(played, "the agent" if by_agent else "an episode")
    if not played.episodes:
        return findings
    findings += agent_findings(played, turns, answered="") if by_agent else []
    findings += completion_findings(played, lengths)
    if any(step.admissible is not False for step in played.steps):  # else no action had an effect
        findings += recurrence(played, episodes, *([PASS_KEY] if by_agent else []), kind="")
    if by_agent:
        findings += recurrence_by_key(played, factory.keywords.get("state_key") is not None)
    findings.append(outcome_finding(played.episodes, turns, "the model's responses", "this model learns"))
    if reasons := Counter(t.failure_reason.partition(":")[0] for t in played.episodes if t.failure_reason):
        shown = ", ".join(f"{reason} {number}" for reason, number in reasons.most_common())
        findings.append(Finding("ok", f"episodes that ended for another reason than their rewards: {shown}"))
    return findings + [finding for find in extra for finding in find(played)]
