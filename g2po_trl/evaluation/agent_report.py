"""Examine an agent before training: play it with random responses or a model's, and return findings with remedies."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ..engines.sampling import derived_seed
from ..environments.adapters.agent import agent_factory
from ..environments.adapters.trl_tools import random_arguments
from ..environments.contract import Observation, StepResult
from ..environments.contract_violations import where_raised
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..prompts.conversation import ChatRequest, ChatResponse, message_text, prefix_digests
from ..prompts.template import DEFAULT_PROMPT
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..trajectory import Trajectory
from .environment_report import describe_failure
from .random_episodes import LEVELS, LONG_TEXT, SLOW_STEP, Finding, graph_findings, outcome_findings

if TYPE_CHECKING:
    from .chat_models import ChatCompletion, ChatModel, ChatSettings

TEXTS = ("yes", "no", "1", "2", "I do not know.")
SHOWN_FAILURES = 3
TEXT_SHARE = 0.1  # of the responses to requests with tools
_IN_ANOTHER = "when the same task gets the same responses in another process"
MANY = 0.2  # of a model's completions


@dataclass
class Played:
    """Episodes with random responses, grouped by task, and what their agent did."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    asked: list[list[list[bytes]]] = field(default_factory=list)  # digest of each request
    failures: list[EnvironmentFailure] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    characters: int = 0
    has_tools: bool = False

    @property
    def episodes(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def infos(self) -> list[dict[str, Any]]:
        return [trajectory.info for trajectory in self.episodes]


def examine_agent(
    agent: Callable | str,
    tasks: Sequence[dict[str, Any]],
    episodes: int = 8,
    turns: int = 30,
    seed: int = 0,
    timeout: float = 60.0,
    environment_variables: Sequence[str] = (),
    texts: Sequence[str] = TEXTS,
    state_key: Callable | None = None,
) -> list[Finding]:
    """Return the findings of episodes with random responses in worker processes, the worst first.

    `texts` are the responses without tool calls, drawn at random. `agent` and `state_key` are as passed to the
    trainer; for the others see `environment_report.examine`.
    """
    try:
        limits = PoolLimits(1, timeout, timeout, environment_variables=list(environment_variables))
        factory = agent_factory(agent, turns, state_key)
        with EnvironmentPool(factory, limits) as pool, EnvironmentPool(factory, limits) as second:
            played = _play(pool, tasks, episodes, random.Random(seed), texts)
            findings = [*_failure_findings(played.failures), *_findings(played, episodes, turns, texts)]
            if played.groups and not played.failures:
                findings += _repeated(second, tasks, played)
    except ValueError as error:  # e.g. variables that are not set
        findings = [Finding("error", str(error))]
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def try_agent(
    agent: Callable | str,
    tasks: Sequence[dict[str, Any]],
    chat: ChatModel,
    episodes: int,
    turns: int,
    settings: ChatSettings,
    max_prompt_length: int | None = None,
    timeout: float = 60.0,
    environment_variables: Sequence[str] = (),
    state_key: Callable | None = None,
) -> list[Finding]:
    """Return the findings of episodes in which a model answers an agent, all at the same time, the worst first.

    Arguments as of `examine_agent`; `max_prompt_length` is not for servers. Raises `ChatError` if a server rejects
    requests or cannot be reached.
    """
    played, lengths = Played(), []

    from .actors import make_actor  # transformers: for episodes with a model alone
    from .agents import DirectAgent

    def count(episode: Episode, completion: ChatCompletion) -> None:
        played.has_tools |= bool(episode.observation.request.tools)
        own = episode.observation.request.max_tokens
        is_own = not completion.complete and own is not None and own < settings.max_tokens
        lengths.append((completion.prompt_tokens, completion.completion_tokens, is_own))

    direct = DirectAgent(DEFAULT_PROMPT, max_prompt_length=max_prompt_length)
    actor = make_actor(chat, direct, settings, lambda episode: (), lambda: None, count)
    factory = agent_factory(agent, turns, state_key)
    limits = PoolLimits(None, timeout, timeout, environment_variables=list(environment_variables))
    rows = [task for task in tasks for _ in range(episodes)]
    groups = [number // episodes for number in range(len(rows))]
    seeds = [derived_seed(0, number) for number in range(len(rows))]
    with EnvironmentPool(factory, limits) as pool:
        trajectories, _ = Player(pool, actor, turns).play(rows, settings.sampling(), groups, seeds)
    played.groups = [[] for _ in tasks]
    for trajectory, group in zip(trajectories, groups):
        if trajectory.counted:
            played.groups[group].append(trajectory)
        else:
            played.failures.append(EnvironmentFailure(*trajectory.error.split(": ", 1)))
    findings = _failure_findings(played.failures)
    if played.episodes:
        findings += [*_call_findings(played), *_exception_findings(played, ""), *_turn_findings(played, turns)]
        findings += [
            *_field_findings(played),
            *_completion_findings(played, lengths),
            *_state_findings(played, episodes, ""),
        ]
        findings += _model_outcomes(played, turns)
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def random_response(request: ChatRequest, rng: random.Random, texts: Sequence[str]) -> ChatResponse:
    """Return a call of a random tool with random arguments, or one of the texts."""
    if not request.tools or rng.random() < TEXT_SHARE:
        return ChatResponse(rng.choice(texts))
    tool = rng.choice(request.tools)
    function = tool.get("function", tool)
    call = {"type": "function", "function": {"name": function["name"], "arguments": random_arguments(function, rng)}}
    return ChatResponse("", (call,), "tool_calls")


def _play(
    pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], episodes: int, rng: random.Random, texts: Sequence[str]
) -> Played:
    played = Played()
    for number, task in enumerate(tasks):
        group: list[Trajectory] = []
        played.asked.append([])
        for _ in range(episodes):
            asked: list[bytes] = []
            ended = _episode(pool, task, str(number), rng, texts, played, asked)
            if isinstance(ended, Trajectory):
                group.append(ended)
                played.asked[-1].append(asked)
                continue
            played.failures.append(ended)
            if ended.kind in ("timeout", "crash"):  # each further episode may take as long
                return played
        played.groups.append(group)
    return played


def _episode(
    pool: EnvironmentPool,
    task: dict[str, Any],
    name: str,
    rng: random.Random,
    texts: Sequence[str],
    played: Played,
    asked: list[bytes],
) -> Trajectory | EnvironmentFailure:
    """Play one episode, and note what its agent does in `played`, and its requests' digests in `asked`."""
    episode = Episode(name)
    seen: Observation | StepResult | EnvironmentFailure = pool.reset([task])[0]
    episode.open(seen)
    while episode.outcome is None:
        request = episode.observation.request
        played.has_tools |= bool(request.tools)
        shown = sum(len(message_text(message)) for message in request.messages)
        played.characters = max(played.characters, shown + len(json.dumps(request.tools or "")))
        action = random_response(request, rng, texts).to_action()
        episode.steps.append(episode.step(action, None))
        asked.append(_digest(request))
        started = time.perf_counter()
        seen = pool.step({0: action})[0]
        played.seconds.append(time.perf_counter() - started)
        episode.advance(seen)
    return seen if isinstance(seen, EnvironmentFailure) else episode.trajectory()


def _digest(request: ChatRequest) -> bytes:
    return prefix_digests(request.messages, request.tools)[-1]


def _failure_findings(failures: Sequence[EnvironmentFailure]) -> list[Finding]:
    """Return findings about the most frequent failures: episodes that are errors, and teach nothing."""
    texts: Counter[str] = Counter()
    for failure in failures:
        texts[f"the agent {_without_response(failure)}"] += 1
    return [
        Finding("error", f"{text} ({count} of {len(failures)} failed episodes)")
        for text, count in texts.most_common(SHOWN_FAILURES)
    ]


def _without_response(failure: EnvironmentFailure) -> str:
    return describe_failure(failure).removeprefix("the agent ").partition(" ('{")[0]


def _raised(info: Mapping[str, Any]) -> str:
    """Return what an agent raised after its first request, and where, or an empty text."""
    reason = str(info.get("failure_reason", ""))
    if not reason.startswith("agent error: "):
        return ""
    return f"{reason.removeprefix('agent error: ')}{where_raised(info.get('traceback', ''))}"


def _findings(played: Played, episodes: int, turns: int, texts: Sequence[str]) -> list[Finding]:
    if not played.episodes:
        return []
    return [
        *_call_findings(played),
        *_exception_findings(played),
        *_turn_findings(played, turns),
        *_field_findings(played),
        *_sizes(played),
        *_state_findings(played, episodes),
        *_outcomes(played, turns, texts),
    ]


def _call_findings(played: Played) -> list[Finding]:
    """Return a finding about the number of calls in an episode."""
    calls = sorted(len(trajectory.steps) for trajectory in played.episodes)
    many = f"{calls[0]}" if calls[0] == calls[-1] else f"{calls[0]} to {calls[-1]}"
    tools = "with tools" if played.has_tools else "without tools"
    text = f"calls the model {many} times per episode (median {median(calls):g}), {tools}."
    if calls[-1] == 1:
        one = "calls the model once per episode: there are no steps to compare, so G2PO equals GRPO."
        return [Finding("warning", one)]
    return [Finding("ok", text)]


def _exception_findings(played: Played, answered: str = ", regardless of the model's answers") -> list[Finding]:
    """Return a finding per distinct exception of the agent after its first request. `answered`: end of a sentence."""
    raised = Counter(filter(None, map(_raised, played.infos)))
    if not raised:
        return [Finding("ok", f"returns a valid reward, or runs out of turns{answered}.")]
    level = "error" if sum(raised.values()) == len(played.episodes) else "warning"
    return [
        Finding(
            level,
            f"raises {text} in {count} of {len(played.episodes)} episodes: each is a failure with reward 0. If the "
            "model can correct itself, send it the error as a message instead.",
        )
        for text, count in raised.items()
    ]


def _turn_findings(played: Played, turns: int) -> list[Finding]:
    """Return a finding about episodes that ask for more than `turns` calls."""
    out = sum(bool(info.get("out_of_turns")) for info in played.infos)
    if not out:
        return [Finding("ok", f"ends within {turns} calls.")]
    text = f"asks for more than {turns} calls in {out} of {len(played.episodes)} episodes, and is refused"
    return [Finding("warning", f"{text}: end the loop earlier, or raise max_turns (here --turns).")]


def _field_findings(played: Played) -> list[Finding]:
    """Return findings about fields of requests without effect, and about refused requests."""
    findings = []
    if ignored := sorted({name for info in played.infos for name in info.get("ignored_fields", ())}):
        text = f"sets {', '.join(ignored)}, which has no effect: the trainer's configuration decides how to sample."
        findings.append(Finding("ok", text))
    refused = [info for info in played.infos if info.get("refused_requests")]
    if refused:
        last = refused[-1].get("refusal", "")
        text = f"sends requests that are refused in {len(refused)} of {len(played.episodes)} episodes: {last}"
        findings.append(Finding("warning", text))
    return findings


def _sizes(played: Played) -> list[Finding]:
    seconds = median(played.seconds)
    text = f"takes {1000 * seconds:.3g} ms between two calls (median, to a worker and back)"
    slow = "more num_environment_workers play more episodes at the same time."
    findings = [Finding("warning", f"{text}: {slow}") if seconds > SLOW_STEP else Finding("ok", f"{text}.")]
    if played.characters > LONG_TEXT:
        findings.append(
            Finding(
                "warning",
                f"a request has {played.characters} characters, tools included, about {played.characters // 4} "
                "tokens: more than max_prompt_length (2048 by default) end the episode. Raise it, or send less.",
            )
        )
    return findings


def _state_findings(played: Played, episodes: int, kind: str = "random ") -> list[Finding]:
    """Return a finding about how often states recur in groups of `episodes` of a kind."""
    remedy = (
        "Pass a state_key, a function of a request's messages (docs/agents.md, State keys), or use "
        "--advantage_estimator grpo."
    )
    if episodes == 1 or max(len(trajectory.steps) for trajectory in played.episodes) == 1:
        return []
    return graph_findings([group for group in played.groups if group], episodes, remedy, kind)


def _outcomes(played: Played, turns: int, texts: Sequence[str]) -> list[Finding]:
    found = outcome_findings(played.episodes, turns, "random responses")
    if played.has_tools or texts is not TEXTS:
        return found
    hint = "responses are drawn from a few words; give texts that the agent understands by --response"
    return [Finding("ok", f"{finding.text.partition(', all')[0].partition(':')[0]} ({hint}).") for finding in found]


def _repeated(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> list[Finding]:
    """Return a finding about each task's longest episode with the same responses in another process."""
    for task, group, requests in zip(tasks, played.groups, played.asked):
        trajectory, asked = max(zip(group, requests), key=lambda pair: len(pair[1]))
        seen = pool.reset([task])[0]
        for number, (step, digest) in enumerate(zip(trajectory.steps, asked), 1):
            observation = getattr(seen, "observation", seen)
            request = getattr(observation, "request", None)
            if isinstance(seen, EnvironmentFailure):
                return [Finding("error", f"{_IN_ANOTHER}, the agent {_without_response(seen)}")]
            if request is None and (raised := _raised(seen.info)) and not _raised(trajectory.info):
                return [Finding("error", f"{_IN_ANOTHER}, the agent raised {raised}")]
            if request is None or _digest(request) != digest:
                return [
                    Finding(
                        "error" if number == 1 else "warning",
                        f"request {number} differs when the same task gets the same responses in another process: "
                        f"{observation.text[:80]!r} and {step.observation[:80]!r}. An episode that loses its worker "
                        "then ends as lost. Seed all randomness from the task, and keep clocks out of messages.",
                    )
                ]
            seen = pool.step({0: step.action})[0]
    return [Finding("ok", "sends the same requests if a task gets the same responses, also in another process.")]


def _completion_findings(played: Played, lengths: Sequence[tuple[int, int, bool]]) -> list[Finding]:
    """Return a finding about lengths of prompts and completions, and one if many calls cannot be read.

    Args:
        played: the episodes.
        lengths: tokens of each prompt and completion, and whether the agent's own `max_tokens` ended the completion.
    """
    steps = [step for trajectory in played.episodes for step in trajectory.steps]
    if not steps:
        return []
    longest, usual = max(prompt for prompt, *_ in lengths), median(written for _, written, _ in lengths)
    cut = sum(step.completion_truncated for step in steps) / len(steps)
    text = f"prompts have at most {longest} tokens, completions {usual:g} (median); {cut:.0%} of them reach the limit"
    limit = "the agent's own max_tokens" if any(is_own for *_, is_own in lengths) else "max_completion_length"
    remedy = f": raise {limit}, or ask for shorter answers."
    findings = [Finding("warning", text + remedy) if cut > MANY else Finding("ok", f"{text}.")]
    if broken := sum(not step.valid for step in steps):
        text = f"{broken} of {len(steps)} completions contain tool calls that cannot be parsed"
        findings.append(Finding("warning" if broken > MANY * len(steps) else "ok", f"{text}."))
    return findings


def _model_outcomes(played: Played, turns: int) -> list[Finding]:
    """Return findings about rewards, and about what ended episodes that failed."""
    reasons = Counter(t.failure_reason.partition(":")[0] for t in played.episodes if t.failure_reason)
    findings = outcome_findings(played.episodes, turns, "the model's responses", "this model learns")
    if reasons:
        shown = ", ".join(f"{reason} {number}" for reason, number in reasons.most_common())
        findings.append(Finding("ok", f"episodes that ended for another reason than their rewards: {shown}."))
    return findings
