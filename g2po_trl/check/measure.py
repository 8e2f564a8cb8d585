"""What episodes of `g2po check` show about speed, texts, states, rewards, agents and completions, as findings."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..credit.graph import StateGraph, record
from ..environments.episode_limits import LIMITS, EpisodeLimits
from ..environments.failures import describe_failure, where_raised
from ..environments.pool.pool import EnvironmentPool
from ..prompts.conversation import message_text
from ..prompts.state_keys import is_workspace_key
from ..runs.metrics import Summary
from ..runs.verdict import Tally
from ..trajectory import Step
from ..view.words import NEWS_KEYS, failure_kind
from .findings import Finding, Kind
from .play import Played, replay_difference
from .statistics import count_in_keys, shared_share

SLOW_STEP = 0.2  # seconds
LONG_TEXT = 8_000  # characters, about 2,000 tokens: the default max_prompt_length
SHORT_TEXT = 60  # characters
MANY = 0.2  # of a model's completions
FEW = 0.1  # of the expert's episodes
SHOWN = 3  # failures of an agent
SMALL_VOCABULARY = 5000  # tokens; a bundled model's has fewer, a pretrained model's more
SHOWN_WORDS = 8
_WORD = re.compile(r"[^\W\d_]+")


def faults(played: Played) -> list[Finding]:
    """Return the environment's faults of the diagnosis that the end of training and reports read."""
    tally = Tally()
    tally.add([list(map(record, group)) for group in played.groups], Summary.of(played.episodes))
    facts = {**vars(tally), "counted": tally.counted}
    return [Finding.warning(Kind[fault.name], **facts) for fault in tally.faults()]


def replayed(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> Finding:
    """Return a finding about playing the actions of each task's longest episode in another process."""
    for task, group in zip(tasks, played.groups):
        longest = max(group, key=lambda trajectory: len(trajectory.steps), default=None)
        if longest and (found := replay_difference(pool, task, longest.steps)):
            return Finding(Kind.NOT_REPLAYED, "error" if found.is_error else "warning", {"difference": found.text})
    return Finding.ok(Kind.REPLAYED)


def speed(played: Played, what: str) -> Finding:
    """Return a finding about the time of `what`, e.g. a step."""
    step, reset = median(played.step_seconds), median(played.reset_seconds)
    facts = {"what": what, "step": 1000 * step, "reset": 1000 * reset}
    return Finding(Kind.SPEED, "warning" if step > SLOW_STEP else "ok", facts)


def limits_reached(played: Played, limits: EpisodeLimits) -> list[Finding]:
    """Return findings about limits that ended episodes, but turns, and about one of tool calls without tools."""
    reasons, number = Counter(_reason(t.failure_reason) for t in played.episodes), len(played.episodes)
    found = [
        Finding(
            Kind.LIMIT,
            "warning" if reasons[limit] > MANY * number else "ok",
            {"count": reasons[limit], "episodes": number, "limit": limit},
        )
        for limit in LIMITS
        if reasons[limit]
    ]
    has_tools = played.has_tools or any(step.tool_calls for step in played.steps)
    why = None if has_tools else limits.without_tools()
    return found if why is None else [*found, Finding.ok(Kind.NO_TOOLS, why=why)]


def long_texts(played: Played) -> list[Finding]:
    """Return a warning about texts that are too long for prompts."""
    facts = {"characters": played.longest, "tokens": played.longest // 4}
    return [Finding.warning(Kind.LONG_TEXT, **facts)] if played.longest > LONG_TEXT else []


def hints(played: Played) -> list[Finding]:
    """Return warnings about missing information in observations."""
    found = [] if played.has_task else [Finding.warning(Kind.NO_TASK)]
    return found if played.lists_actions else [*found, Finding.warning(Kind.NO_ACTIONS)]


def recurrence(played: Played, kind: str = "random ", is_agent: bool = False) -> list[Finding]:
    """Return findings about how often states recur in groups, and what they hide."""
    groups = [group for group in played.groups if group]
    if all(len(group) == 1 for group in groups) or len(played.steps) == len(played.episodes):
        return []
    graph = StateGraph.from_groups(groups)
    statistics = graph.statistics()
    alone = statistics["singleton_step_fraction"]
    facts = {"kind": kind, "visits": statistics["mean_group_size"], "alone": alone}
    # Where a turn has one state, its number is all that tells states apart.
    most_turns = sum(max(len(trajectory.steps) for trajectory in group) for group in groups)
    is_known = played.answers_are_known or is_agent
    if (graph.num_nodes > most_turns or not is_known) and (counted := count_in_keys(played.episodes)):
        return [Finding.warning(Kind.COUNTER, counter=str(counted), **counted._asdict())]
    if not is_known:  # random actions without a list lead nowhere
        return []
    rare = Kind.RARE_REQUESTS if is_agent else Kind.RARE_STATES
    found = Finding.warning(rare, **facts) if alone > 0.5 else Finding.ok(Kind.RECURRENCE, **facts)
    return [found, *short_texts(played)]


def recurrence_by_key(played: Played, is_own: bool) -> list[Finding]:
    """Return a finding about how often an agent's states recur under each key. `is_own`: it has its own key."""
    groups = [group for group in played.groups if len(group) > 1]
    if not any(len(trajectory.steps) > 1 for group in groups for trajectory in group):
        return []
    has_files = all(is_workspace_key(step.key) for step in played.steps)
    key = "your state key" if is_own else "files and new messages" if has_files else "the default key"
    used, (news, normalised) = shared_share(groups), (shared_share(groups, key) for key in NEWS_KEYS.values())
    is_coarser = not is_own and not has_files and max(news, normalised) > used + MANY
    facts = {"used": used, "key": key, "news": news, "normalised": normalised}
    return [Finding(Kind.KEYS, "warning" if is_coarser else "ok", facts)]


def short_texts(played: Played) -> list[Finding]:
    """Return a warning about the most frequent short text from which the same action leads to different states."""
    visits: Counter[tuple[int, str]] = Counter()
    nexts = defaultdict(set)
    for number, group in enumerate(played.groups):
        for trajectory in group:
            keys = [step.key for step in trajectory.steps[1:]] + [None] * (trajectory.outcome != "truncated")
            for step, after in zip(trajectory.steps, keys):
                if len(step.observation) <= SHORT_TEXT:
                    visits[number, step.observation] += 1
                    nexts[number, step.observation, step.key, step.compared_action].add(after)
    hiding = {state[:2] for state, after in nexts.items() if len(after) > 1}
    for (number, text), count in visits.most_common():
        if (number, text) in hiding:
            return [Finding.warning(Kind.SHORT_TEXT, text=text, visits=count)]
    return []


def outcomes(played: Played, turns: int, who: str = "random actions", learner: str = "") -> Finding:
    """Return a finding about successes and rewards. `learner`: who learns nothing if rewards are equal."""
    trajectories = played.episodes
    rewards, successes = [t.reward for t in trajectories], sum(t.success for t in trajectories)
    facts = {
        "who": who,
        "successes": successes,
        "episodes": len(trajectories),
        "ended": sum(t.outcome != "truncated" for t in trajectories),
        "turns": turns,
        "low": min(rewards),
        "high": max(rewards),
        "learner": learner or "a model that acts randomly",
    }
    if successes == len(trajectories):
        return Finding.warning(Kind.ALL_WON, **facts)
    if len(set(rewards)) == 1:
        return Finding.warning(Kind.EQUAL_REWARDS, **facts)
    return Finding.ok(Kind.OUTCOMES, **facts)


def agent_failures(played: Played, who: str = "the agent") -> list[Finding]:
    """Return findings about the most frequent environment errors, which teach nothing. `who`: subject of the text."""
    texts: Counter[str] = Counter()
    for failure in played.failures:
        texts[describe_failure(failure).removeprefix("the agent ").partition(" ('{")[0]] += 1
    facts = {"who": who, "failures": len(played.failures)}
    return [
        Finding.error(Kind.FAILED_AGENT, failure=text, count=count, **facts)
        for text, count in texts.most_common(SHOWN)
    ]


def agent_findings(played: Played, turns: int) -> list[Finding]:
    """Return findings about an agent's calls, exceptions and requests."""
    infos, number = [trajectory.info for trajectory in played.episodes], len(played.episodes)
    errors = Counter(filter(None, map(_raised, infos)))
    level = "error" if errors.total() == number else "warning"
    calls = sorted(len(trajectory.steps) for trajectory in played.episodes)
    found = []
    if calls[-1] > 1:
        tools = "with tools" if played.has_tools else "without tools"
        facts = {"least": calls[0], "most": calls[-1], "median": median(calls), "tools": tools}
        found.append(Finding.ok(Kind.CALLS, **facts))
    elif level != "error":  # one that raises in its first call may make more
        found.append(Finding.warning(Kind.ONE_CALL))
    for (error, where), count in errors.items():
        facts = {"error": error, "where": where, "count": count, "episodes": number}
        found.append(Finding(Kind.RAISED_IN_AGENT, level, facts))
    if out := sum(bool(info.get("out_of_turns")) for info in infos):
        found.append(Finding.warning(Kind.TOO_MANY_CALLS, turns=turns, count=out, episodes=number))
    if ignored := sorted({name for info in infos for name in info.get("ignored_fields", ())}):
        found.append(Finding.ok(Kind.IGNORED_FIELDS, fields=ignored))
    if refused := [info for info in infos if info.get("refused_requests")]:
        facts = {"count": len(refused), "episodes": number, "refusal": refused[-1].get("refusal", "")}
        found.append(Finding.warning(Kind.REFUSED_REQUESTS, **facts))
    return found


def _raised(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the exception that an agent raised after its first request, and its place."""
    kind, _, error = str(info.get("failure_reason", "")).partition(": ")
    return (error, where_raised(info.get("traceback", ""))) if kind == "agent error" else None


def _reason(text: str | None) -> str:
    """Return the kind in a failure reason, "kind: detail"."""
    return (text or "").partition(":")[0]


def completion_findings(played: Played, lengths: Sequence[tuple[int, int]]) -> list[Finding]:
    """Return findings about a model's completions: lengths in tokens, format, listed actions, tool calls, endings."""
    steps, found = played.steps, []

    def add(kind: Kind, fits: bool, **facts: Any) -> None:
        found.append(Finding(kind, "ok" if fits else "warning", facts))

    if steps:
        longest, written = max(read for read, _ in lengths), median(written for _, written in lengths)
        cut = sum(step.completion_truncated for step in steps) / len(steps)
        add(Kind.LENGTHS, cut <= MANY, longest=longest, written=written, cut=cut)
    formatted = [step.valid for step in steps if step.call is None]
    if broken := formatted.count(False):
        add(Kind.FORMAT, broken <= MANY * len(formatted), broken=broken, completions=len(formatted))
    if listed := [step.admissible for step in steps if step.admissible is not None]:
        admissible = sum(listed)
        add(Kind.ADMISSIBLE, 2 * admissible > len(listed), admissible=admissible, listed=len(listed))
    found += call_findings(steps)
    if reasons := Counter(_reason(t.failure_reason) for t in played.episodes if t.failure_reason):
        found.append(Finding.ok(Kind.ENDINGS, reasons=dict(reasons.most_common())))
    return found


def call_findings(steps: Sequence[Step]) -> list[Finding]:
    """Return a finding about the tool calls of completions whose prompts offer tools."""
    calls = Counter(step.call for step in steps if step.call is not None)
    called = calls.total() - calls["none"]
    parsed = called - calls["unreadable"]
    known = parsed - calls["unknown"]
    facts = {"offered": calls.total(), "called": called, "parsed": parsed, "known": known}
    few = not known or known < called * (1 - MANY)
    return [Finding(Kind.TOOL_CALLS, "warning" if few else "ok", facts)] if calls else []


def expert_findings(played: Played, turns: int) -> list[Finding]:
    """Return a finding about an expert's success within the turns of an episode."""
    won = [trajectory for trajectory in played.episodes if trajectory.success]
    others = [failure_kind(trajectory) for trajectory in played.episodes if not trajectory.success]
    number = len(played.episodes) + len(played.failures)
    steps = median([len(trajectory.steps) for trajectory in won or played.episodes] or [0])
    reasons = sorted({*others, *map(describe_failure, played.failures)})[:SHOWN]
    facts = {"successes": len(won), "episodes": number, "turns": turns, "steps": steps, "reasons": reasons}
    if len(won) < FEW * number:
        return [Finding.warning(Kind.EXPERT_FAILS, **facts)]
    if won and steps >= turns > 1 and reasons:
        return [Finding.warning(Kind.EXPERT_NEEDS_ALL_TURNS, **facts)]
    return [Finding.ok(Kind.EXPERT, **facts)]


def spelled_words(steps: Sequence[Step], model: str | Path, with_actions: bool = False) -> list[Finding]:
    """Return a warning about words that a model has to write and its tokenizer splits into several tokens.

    Empty for a model that is not in a folder, or has a large vocabulary.

    Args:
        steps: steps of whole episodes. The words are those of listed actions and of the names of tools.
        model: a folder.
        with_actions: also the words of the actions that were played, e.g. by an expert.
    """
    file = Path(model, "tokenizer.json")
    if not file.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > SMALL_VOCABULARY:
        return []

    def pieces(word: str) -> int:  # inside a text or at its beginning
        return min(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}"))

    counts: Counter[str] = Counter()
    for step in steps:
        answer = step.response or {"content": step.action}
        written = [*(step.admissible_actions or ())]
        written += [call["function"]["name"] for call in answer.get("tool_calls", ())]
        written += [message_text(answer)] if with_actions else []
        counts.update({word for text in written for word in _WORD.findall(text)})
    spelled = [word for word, _ in counts.most_common() if pieces(word) > 1]
    shown = [*spelled[:SHOWN_WORDS], *[f"… ({len(spelled)} words)"] * (len(spelled) > SHOWN_WORDS)]
    return [Finding.warning(Kind.SPELLED_WORDS, model=str(model), words=shown)] if spelled else []
