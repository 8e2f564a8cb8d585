"""What episodes of `g2po check` show about texts, states, rewards, agents and completions, as findings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from ..credit.graph import StateGraph
from ..credit.state_keys import PARTS, part_of_key
from ..environments.causes import describe_failure, where_raised
from ..environments.episode_limits import LIMITS
from ..environments.pool.pool import EnvironmentFailure
from ..prompts.conversation import message_text
from ..prompts.state_keys import is_workspace_key
from ..runs.metrics import Summary
from ..runs.verdict import FAULTS, Tally
from ..trajectory import Step
from ..view.words import NEWS_KEYS, failure_kind
from .findings import Finding, Kind
from .play import Played
from .statistics import count_in_keys, shared_share

MANY = 0.2  # of a model's completions
FEW = 0.1  # of the expert's episodes
SHOWN = 3  # failures of an agent
SMALL_VOCABULARY = 5000  # tokens; a bundled model's has fewer, a pretrained model's more
SHOWN_WORDS = 8
RATIOS = {  # of a model's steps: metric, and the share from which it is fine
    Kind.FORMAT: ("valid_action_ratio", 0.8),
    Kind.ADMISSIBLE: ("admissible_action_ratio", 0.5),
    Kind.TOOL_CALLS: ("tool_call_ratio", 0.01),
    Kind.READABLE_CALLS: ("readable_call_ratio", 0.8),
    Kind.KNOWN_CALLS: ("known_call_ratio", 0.8),
}
_WORD = re.compile(r"[^\W\d_]+")


def faults(played: Played) -> list[Finding]:
    """Return the environment's faults of the diagnosis that the end of training and reports read."""
    tally = Tally.of(played.groups)
    return [Kind[cause.name].found(**tally) for cause in FAULTS if cause.holds(tally)]


def environment_findings(played: Played) -> Iterator[Finding]:
    """Yield findings about observations, and about limits that ended episodes."""
    reasons = Counter((episode.failure_reason or "").partition(":")[0] for episode in played.episodes)
    for limit in LIMITS:
        if reasons[limit] > MANY * reasons.total():
            yield Kind.LIMIT.found(count=reasons[limit], episodes=reasons.total(), limit=limit)
    if not all(one.task or one.steps[0].messages is not None for one in played.episodes if one.steps):
        yield Kind.NO_TASK.found()
    if not played.lists_actions:
        yield Kind.NO_ACTIONS.found()


def recurrence(played: Played, kind: str = "random ", is_agent: bool = False) -> list[Finding]:
    """Return a finding about how often states recur in groups, or about the number that keeps them from it."""
    groups = [group for group in played.groups if group]
    if all(len(group) == 1 for group in groups) or len(played.steps) == len(played.episodes):
        return []
    graph = StateGraph.from_groups(groups)
    # Where a turn has one state, its number is all that tells states apart.
    most_turns = sum(max(len(trajectory.steps) for trajectory in group) for group in groups)
    is_known = played.has_tools or played.lists_actions or is_agent  # random actions without a list lead nowhere
    if (graph.num_nodes > most_turns or not is_known) and (counter := count_in_keys(played.episodes)):
        return [Kind.COUNTER.found(counter=counter)]
    visits, alone = (graph.statistics()[name] for name in ("mean_group_size", "singleton_step_fraction"))
    found = Kind.RARE_STATES if alone > 0.5 else Kind.RECURRENCE
    return [found.found(kind=kind, visits=visits, alone=alone)] if is_known else []


def recurrence_by_key(played: Played, key: Callable[[Step], str] | None) -> list[Finding]:
    """Return a finding about how often an agent's states recur by the key in use, `None`: its own, and by others."""
    groups = [group for group in played.groups if len(group) > 1]
    if not any(len(trajectory.steps) > 1 for group in groups for trajectory in group):
        return []
    has_files = all(is_workspace_key(step.key) for step in played.steps)
    keys = {part: partial(part_of_key, part=part) for part in PARTS} if has_files else NEWS_KEYS
    shares = {name: shared_share(groups, other) for name, other in keys.items()}
    used, enough = shared_share(groups, key or (lambda step: step.key)), max(shares.values()) - MANY
    best = next(name for name, share in shares.items() if share >= enough)
    return [(Kind.PARTS if has_files else Kind.KEYS).judged(used >= enough, used=used, others=shares, best=best)]


def outcomes(played: Played, turns: int, who: str) -> Finding:
    """Return a finding about successes and rewards."""
    rewards, successes = [one.reward for one in played.episodes], sum(one.success for one in played.episodes)
    is_equal = len(set(rewards)) == 1
    cut = [one.steps[-1] for one in played.episodes if one.outcome == "truncated" and 0 < len(one.steps) < turns]
    paid = sum(step.reward > 0 for step in cut)  # by the environment, in the step that it cut
    kind = Kind.PAID_TRUNCATED if paid and not successes else Kind.OUTCOMES
    kind = Kind.ALL_WON if successes == len(rewards) else Kind.EQUAL_REWARDS if is_equal else kind
    ended = sum(one.outcome != "truncated" for one in played.episodes)
    facts = {"who": who, "successes": successes, "episodes": len(rewards), "ended": ended, "turns": turns}
    return kind.found(**facts, paid=paid, low=min(rewards), high=max(rewards))


def failures(found: Sequence[EnvironmentFailure], who: str = "the agent") -> list[Finding]:
    """Return findings about the most frequent environment errors, which teach nothing. `who`: subject of the text."""
    said = [describe_failure(failure).removeprefix("the agent ").partition(" ('{")[0] for failure in found]
    times = Counter(said).most_common(SHOWN)
    return [Kind.FAILED.found(who=who, failure=text, count=count, failures=len(said)) for text, count in times]


def agent_findings(played: Played, turns: int) -> Iterator[Finding]:
    """Yield findings about an agent's calls, exceptions and requests."""
    infos, number = [trajectory.info for trajectory in played.episodes], len(played.episodes)
    raised = [info for info in infos if str(info.get("failure_reason")).startswith("agent error: ")]
    level = "error" if len(raised) == number else "warning"
    if level == "warning" and all(len(trajectory.steps) <= 1 for trajectory in played.episodes):
        yield Kind.ONE_CALL.found()  # one that raises in its first call may make more
    errors = Counter((info["failure_reason"], where_raised(info.get("traceback", ""))) for info in raised)
    for (error, where), count in errors.items():
        facts = {"error": error.removeprefix("agent error: "), "where": where, "count": count, "episodes": number}
        yield Kind.RAISED_IN_AGENT.found(level, **facts)
    if out := sum(bool(info.get("out_of_turns")) for info in infos):
        yield Kind.TOO_MANY_CALLS.found(turns=turns, count=out, episodes=number)
    if refused := [info.get("refusal", "") for info in infos if info.get("refused_requests")]:
        yield Kind.REFUSED_REQUESTS.found(count=len(refused), episodes=number, refusal=refused[-1])


def completion_findings(played: Played, lengths: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Yield findings about a model's completions: lengths in tokens, format, listed actions, tool calls."""
    cut = sum(step.completion_truncated for step in played.steps) / max(1, len(played.steps))
    if not lengths:  # no prompt fits
        return
    longest, written = max(read for read, _ in lengths), median(written for _, written in lengths)
    yield Kind.LENGTHS.judged(cut <= MANY, longest=longest, written=written, cut=cut)
    summary = Summary.of(played.episodes)
    for kind, (metric, least) in RATIOS.items():
        if number := summary.numbers[metric]:
            yield kind.judged(summary.totals[metric] >= least * number, count=summary.totals[metric], number=number)


def expert_finding(played: Played, turns: int) -> Finding:
    """Return the finding about an expert's success within the turns of an episode."""
    won = [trajectory for trajectory in played.episodes if trajectory.success]
    others = [failure_kind(trajectory) for trajectory in played.episodes if not trajectory.success]
    number = len(played.episodes) + len(played.failures)
    steps = median([len(trajectory.steps) for trajectory in won or played.episodes] or [0])
    reasons = sorted({*others, *map(describe_failure, played.failures)})[:SHOWN]
    facts = {"successes": len(won), "episodes": number, "turns": turns, "steps": steps, "reasons": reasons}
    if len(won) < FEW * number:
        return Kind.EXPERT_FAILS.found(**facts)
    return Kind.EXPERT.judged(not (won and reasons and steps >= turns > 1), **facts)


def spelled_words(steps: Sequence[Step], model: str | Path | None, with_actions: bool = False) -> list[Finding]:
    """Return a warning about words of listed actions, tools and, `with_actions`, played ones, that a model spells."""
    file = Path(model or "", "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file)) if model is not None and file.is_file() else None
    if tokenizer is None or tokenizer.get_vocab_size() > SMALL_VOCABULARY:
        return []
    counts: Counter[str] = Counter()
    for step in steps:
        answer = step.response or {"content": step.action}
        written = [*(step.admissible_actions or ())]
        written += [call["function"]["name"] for call in answer.get("tool_calls", ())]
        written += [message_text(answer)] if with_actions else []
        counts.update({word for text in written for word in _WORD.findall(text)})

    def is_spelled(word: str) -> bool:  # inside a text and at its beginning
        tokens = tokenizer.encode_batch([word, f" {word}"], add_special_tokens=False)
        return all(len(one.ids) > 1 for one in tokens)

    spelled = [word for word, _ in counts.most_common() if is_spelled(word)]
    return [Kind.SPELLED_WORDS.found(model=str(model), words=spelled[:SHOWN_WORDS])] if spelled else []
