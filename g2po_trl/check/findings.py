"""Findings of `g2po check` in episodes: about speed, texts, states and rewards, each with a remedy."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..credit.graph import StateGraph
from ..credit.state_keys import count_in_keys, shared_share
from ..environments.episode_limits import LIMITS, EpisodeLimits
from ..environments.failures import describe_failure, where_raised
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..prompts.conversation import message_text
from ..prompts.state_keys import is_workspace_key
from ..trajectory import Step, Trajectory
from ..view.words import NEWS_KEYS
from .contract import Finding
from .play import Played
from .replay import replay_difference

SLOW_STEP = 0.2  # seconds
LONG_TEXT = 8_000  # characters, about 2,000 tokens: the default max_prompt_length
SHORT_TEXT = 60  # characters
MANY_TURNS = 3  # at which a short text is seen in episodes of a task
MANY = 0.2  # of a model's completions
SHOWN_FAILURES = 3
SMALL_VOCABULARY = 5000  # tokens; a bundled model's has fewer, a pretrained model's more
SHOWN_WORDS = 8
_WORD = re.compile(r"[^\W\d_]+")
_FAILED = ("before step 1,", "exception: ", "invalid: ", "timeout: ", "crash: ")  # differences that are errors
IMPROVE_KEYS = (
    "Give equal states an equal state_key (leave out counters and clocks), or see the options state_key and "
    "state_key_ignores."
)
NORMALISED_KEY = "g2po_trl.prompts.state_keys:normalised_key"
PASS_KEY = (
    "Pass a state_key, a function of a request's messages ('State keys' on the page 'Your agent'), or use "
    "--advantage-estimator grpo."
)


def replayed(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> Finding:
    """Return a finding about playing the actions of each task's longest episode in another process."""
    for task, group in zip(tasks, played.groups):
        longest = max(group, key=lambda one: len(one.steps), default=None)
        if longest and (different := replay_difference(pool, task, longest.steps)):
            failed = different.startswith(_FAILED) or "agent error: " in different
            kind, _, message = different.partition(": ")
            if "\n" in message:  # a traceback
                different = f"it {describe_failure(EnvironmentFailure(kind, message))}"
            return Finding(
                "error" if failed else "warning",
                f"the same actions do not lead to the same states in another process: {different}",
                "An episode that loses its worker then ends as lost. Seed all randomness from the task (hash() of a "
                "text and the order of a set differ by process), and show no clocks and random names.",
            )
    return Finding("ok", "the same actions lead to the same states, also in another process")


def speed(played: Played, what: str) -> list[Finding]:
    """Return a finding about the time of `what`, e.g. a step."""
    step, reset = median(played.step_seconds), median(played.reset_seconds)
    text = f"{what} takes {1000 * step:.3g} ms, a reset {1000 * reset:.3g} ms (medians, to a worker and back)"
    remedy = "Cache what is recomputed, or raise num_environment_workers."
    return [Finding("warning", f"{text}, which is slow", remedy) if step > SLOW_STEP else Finding("ok", text)]


def limits_reached(played: Played) -> list[Finding]:
    """Return a finding about each limit that ended episodes; turns are part of the finding about outcomes."""
    reasons = Counter((one.failure_reason or "").partition(":")[0] for one in played.episodes)
    findings = []
    for limit in LIMITS:
        text = f"{reasons[limit]} of {len(played.episodes)} episodes ended as failures by the {limit}"
        many = reasons[limit] > MANY * len(played.episodes)
        remedy = "Raise it, or let episodes end earlier: a failure gets no further reward."
        findings += [Finding("warning" if many else "ok", text, remedy * many)] if reasons[limit] else []
    return findings


def tool_limit(played: Played, limits: EpisodeLimits) -> list[Finding]:
    """Return a finding about a limit of tool calls without tools; other environments of the run may have some."""
    why = None if played.has_tools or any(step.tool_calls for step in played.steps) else limits.without_tools()
    return [] if why is None else [Finding("ok", f"{why}. Limit other episodes by max_turns")]


def length(played: Played) -> list[Finding]:
    """Return findings about images, and a warning about texts that are too long for prompts."""
    if played.longest <= LONG_TEXT:
        return images(played)
    text = f"an observation or a request has {played.longest} characters, about {played.longest // 4} tokens"
    remedy = "Shorten it, or raise max_prompt_length: longer prompts lose their middle, or end agents."
    return [*images(played), Finding("warning", text, remedy)]


def images(played: Played) -> list[Finding]:
    """Return a finding about the images of observations."""
    shown = [image for step in played.steps for image in step.images or ()]
    if not shown:
        return []
    most = max(len(step.images or ()) for step in played.steps)
    width, height = max((image.size for image in shown), key=lambda size: size[0] * size[1])
    text = f"observations have images: at most {most}, the largest of {width} x {height} pixels"
    return [Finding("ok", f"{text}. A vision-language model must read them")]


def hints(played: Played) -> list[Finding]:
    """Return warnings about missing information in observations."""
    findings = []
    if not played.has_task:
        text = "reset gives no Observation.task: after the first step only the history shows the goal"
        findings.append(Finding("warning", text, "Set it, or repeat the goal in every observation."))
    if played.lists_some and not played.lists_actions:
        text = "some observations list admissible actions and others do not: random episodes play 'look' there"
        findings.append(
            Finding("warning", text, "List them in each Observation; a step that returns a text has none.")
        )
    elif not played.lists_actions:
        text = "no admissible actions are listed: random episodes play 'look'"
        remedy = "The model has to know the possible actions: list them, or describe them in the prompt template."
        findings.append(Finding("warning", text, remedy))
    return findings


def constant(played: Played) -> list[Finding]:
    """Return a warning if each task has one state only, although actions were played."""
    if len(played.steps) == len(played.episodes) or any(
        len({step.key for t in group for step in t.steps}) > 1 for group in played.groups
    ):
        return []
    shown = played.steps[0].observation[:60]
    text = f"all {len(played.steps)} observations of the random episodes are the same ({shown!r}), and one state"
    return [Finding("warning", text, "Show in the observation what an action changes, and list the actions.")]


def counting(played: Played) -> list[Finding]:
    """Return a warning if a number in the keys makes each state of an episode new."""
    text = count_in_keys(played.episodes)
    remedy = "Leave counters and clocks out of the state_key, or set state_key_ignores: [numbers]."
    return [] if text is None else [Finding("warning", text, remedy)]


def recurrence(played: Played, episodes: int, remedy: str = IMPROVE_KEYS, kind: str = "random ") -> list[Finding]:
    """Return findings about how often states recur in groups, and what they hide. `remedy` for rare recurrence."""
    groups = [group for group in played.groups if group]
    if episodes == 1 or len(played.steps) == len(played.episodes):
        return []
    graph = StateGraph.from_groups(groups)
    statistics = graph.statistics()
    size, alone = statistics["mean_group_size"], statistics["singleton_step_fraction"]
    text = (
        f"{episodes} {kind}episodes of a task visit a state {size:.1f} times on average; {100 * alone:.0f} % of the "
        "steps are in a state visited once"
    )
    if graph.num_nodes == len(groups) and graph.num_steps > len(groups):
        remedy = "Let state_key or the text distinguish states."
        found = Finding("warning", f"{text}: a task has one state only", remedy)
    # Where a turn has one state, its number is all that tells states apart.
    elif graph.num_nodes > sum(max(len(one.steps) for one in group) for group in groups) and (
        counted := counting(played)
    ):
        found = replace(counted[0], text=f"{text}; {counted[0].text}")
    elif alone > 0.5:
        little = "most actions are compared with no other, and G2PO is little more than GRPO"
        found = Finding("warning", f"{text}: {little}", remedy)
    else:
        found = Finding("ok", f"{text}: there is a graph to learn from")
    return [found, *_short_texts(groups)]


def recurrence_by_key(played: Played, is_own: bool) -> list[Finding]:
    """Return a finding about how often an agent's states recur under each key. `is_own`: it has its own key."""
    groups = [group for group in played.groups if len(group) > 1]
    if not any(len(trajectory.steps) > 1 for group in groups for trajectory in group):
        return []
    has_files = all(is_workspace_key(step.key) for step in played.steps)
    used = "your state key" if is_own else "files and new messages" if has_files else "the default key"
    shares = {name: shared_share(groups, key) for name, key in NEWS_KEYS.items()}
    listed = ", ".join(f"{100 * share:.0f} % by {name}" for name, share in shares.items())
    in_use = shared_share(groups)
    text = f"calls in a state of another episode of the task: {100 * in_use:.0f} % by {used} (in use), {listed}"
    if not is_own and not has_files and max(shares.values()) > in_use + MANY:
        return [Finding("warning", text, f"Try --agent-state-key {NORMALISED_KEY}.")]
    return [Finding("ok", text)]


def _short_texts(groups: list[list[Trajectory]]) -> list[Finding]:
    """Return a finding about the short text that is the state in most turns, if it hides an episode's progress."""
    found: list[tuple[int, str, set[int], bool]] = []
    for group in groups:
        turns, nexts, texts = defaultdict(list), defaultdict(lambda: defaultdict(list)), {}
        for trajectory in group:
            keys = [step.key for step in trajectory.steps[1:]] + [None] * (trajectory.outcome != "truncated")
            for turn, step in enumerate(trajectory.steps, 1):
                turns[step.key].append(turn)
                texts[step.key] = step.observation
                nexts[step.key][step.compared_action] += keys[turn - 1 : turn]
        for key, seen in turns.items():
            again = [set(after) for after in nexts[key].values() if len(after) > 1]
            hides = any(len(after) > 1 for after in again)
            if len(texts[key]) <= SHORT_TEXT and len(set(seen)) >= MANY_TURNS and (hides or not again):
                found.append((len(seen), texts[key], set(seen), hides))
    if not found:
        return []
    visits, text, at, hides = max(found, key=lambda one: one[0])
    which = ", ".join(map(str, sorted(at)[:5])) + (", …" if len(at) > 5 else "")
    leads = ", and the same action leads from it to different states" if hides else ""
    text = f"the short text {text!r} is one state in {visits} steps, at turns {which}{leads}"
    remedy = "Situations with this text are compared as one: add what is missing to the text or the state_key."
    return [Finding("warning", text, remedy)]


def outcome_finding(
    trajectories: list[Trajectory],
    turns: int,
    what: str = "random actions",
    who: str = "a model that acts randomly learns",
) -> Finding:
    """Return a finding about successes and rewards of `what`. `who`: who learns nothing if rewards are equal."""
    successes = sum(t.success for t in trajectories)
    ended = sum(t.outcome != "truncated" for t in trajectories)
    text = f"{what} succeed in {successes} of {len(trajectories)} episodes; {ended} end within {turns} turns"
    rewards = {t.reward for t in trajectories}
    if successes == len(trajectories):
        text += ": there is nothing to learn, since a group whose episodes all succeed has no advantages"
        remedy = "Make the tasks harder: more steps to the goal, or wrong actions that end an episode."
        return Finding("warning", text, remedy, True)
    if len(rewards) == 1:
        text += f", all with reward {rewards.pop():g}: {who} nothing here"
        return Finding("warning", text, "Start from one that sometimes succeeds, or from easier tasks.", True)
    return Finding("ok", f"{text}; rewards from {min(rewards):g} to {max(rewards):g}")


def agent_failures(played: Played, who: str = "the agent") -> list[Finding]:
    """Return findings about the most frequent environment errors, which teach nothing. `who`: subject of the text."""
    texts: Counter[str] = Counter()
    for failure in played.failures:
        texts[describe_failure(failure).removeprefix("the agent ").partition(" ('{")[0]] += 1
    return [
        Finding("error", f"{who} {text} ({count} of {len(played.failures)} failed episodes)")
        for text, count in texts.most_common(SHOWN_FAILURES)
    ]


def agent_findings(played: Played, turns: int, answered: str = ", regardless of the model's answers") -> list[Finding]:
    """Return findings about an agent's calls, exceptions and requests. `answered`: end of a sentence."""
    infos, number = [trajectory.info for trajectory in played.episodes], len(played.episodes)
    findings = [_calls(played)]
    errors = Counter(filter(None, map(_raised, infos)))
    level = "error" if sum(errors.values()) == number else "warning"
    for text, count in errors.items():
        text = f"raises {text} in {count} of {number} episodes: each is a failure with reward 0"
        remedy = "If the model can correct itself, send it the error as a message instead."
        findings.append(Finding(level, text, remedy))
    if not errors:
        findings.append(Finding("ok", f"returns a valid reward, or runs out of turns{answered}"))
    if out := sum(bool(info.get("out_of_turns")) for info in infos):
        text = f"asks for more than {turns} calls in {out} of {number} episodes, and is refused"
        findings.append(Finding("warning", text, "End the loop earlier, or raise --max-turns."))
    else:
        findings.append(Finding("ok", f"ends within {turns} calls"))
    if ignored := sorted({name for info in infos for name in info.get("ignored_fields", ())}):
        text = f"sets {', '.join(ignored)}, which has no effect: the trainer's configuration decides how to sample"
        findings.append(Finding("ok", text))
    if refused := [info for info in infos if info.get("refused_requests")]:
        text = (
            f"sends requests that are refused in {len(refused)} of {number} episodes: {refused[-1].get('refusal', '')}"
        )
        findings.append(Finding("warning", text))
    return findings


def _calls(played: Played) -> Finding:
    calls = sorted(len(trajectory.steps) for trajectory in played.episodes)
    if calls[-1] == 1:
        return Finding(
            "warning", "calls the model once per episode: there are no steps to compare, so G2PO equals GRPO"
        )
    many = f"{calls[0]}" if calls[0] == calls[-1] else f"{calls[0]} to {calls[-1]}"
    tools = "with tools" if played.has_tools else "without tools"
    return Finding("ok", f"calls the model {many} times per episode (median {median(calls):g}), {tools}")


def _raised(info: Mapping[str, Any]) -> str:
    """Return the exception that an agent raised after its first request, and its place, or an empty text."""
    reason = str(info.get("failure_reason", ""))
    if not reason.startswith("agent error: "):
        return ""
    return f"{reason.removeprefix('agent error: ')}{where_raised(info.get('traceback', ''))}"


def completion_findings(played: Played, lengths: Sequence[tuple[int, int]]) -> list[Finding]:
    """Return findings about lengths of prompts and completions in tokens, and about calls that cannot be read."""
    steps = played.steps
    if not steps:
        return []
    longest, usual = max(read for read, _ in lengths), median(written for _, written in lengths)
    cut = sum(step.completion_truncated for step in steps) / len(steps)
    text = f"prompts have at most {longest} tokens, completions {usual:g} (median); {cut:.0%} of them reach the limit"
    remedy = "Raise max_completion_length (and the agent's own max_tokens), or ask for shorter answers."
    findings = [Finding("warning", text, remedy) if cut > MANY else Finding("ok", text)]
    return [*findings, *_formats(steps), *call_findings(steps)]


def _formats(steps: Sequence[Step]) -> list[Finding]:
    """Return findings about completions without the required format, and about actions that are not listed."""
    findings, listed = [], [step.admissible for step in steps if step.admissible is not None]
    without_tools = [step for step in steps if step.call is None]
    broken = sum(not step.valid for step in without_tools)
    if broken:
        text = f"{broken} of {len(without_tools)} completions do not have the required format"
        few = broken <= MANY * len(without_tools)
        remedy = "Read some with g2po check --show and g2po play --model MODEL; or fine-tune the model (g2po teach)."
        findings.append(Finding("ok", text) if few else Finding("warning", text, remedy))
    if listed:
        text = f"{sum(listed)} of {len(listed)} actions are among those that the environment lists"
        remedy = "The model does not copy them: use a larger one, or fine-tune it on demonstrations (g2po teach)."
        findings.append(Finding("ok", text) if 2 * sum(listed) > len(listed) else Finding("warning", text, remedy))
    return findings


def call_findings(steps: Sequence[Step]) -> list[Finding]:
    """Return a finding about the tool calls of completions whose prompts offer tools."""
    calls = Counter(step.call for step in steps if step.call is not None)
    if not calls:
        return []
    made = calls.total() - calls["none"]
    read, exist = made - calls["unreadable"], made - calls["unreadable"] - calls["unknown"]
    text = (
        f"{made} of {calls.total()} completions call a tool; {read} of these can be parsed, {exist} call a known one"
    )
    if not exist:
        remedy = "Use a model that was trained to call tools, or fine-tune it on demonstrations (g2po teach)."
        return [Finding("warning", text, remedy)]
    return [Finding("warning" if exist < made * (1 - MANY) else "ok", text)]


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
    counts: Counter[str] = Counter()
    for step in steps:
        answer = step.response or {"content": step.action}
        written = [*(step.admissible_actions or ())]
        written += [call["function"]["name"] for call in answer.get("tool_calls", ())]
        written += [message_text(answer)] if with_actions else []
        counts.update({word for text in written for word in _WORD.findall(text)})
    spelled = [word for word, _ in counts.most_common() if _pieces(tokenizer, word) > 1]
    if not spelled:
        return []
    shown = ", ".join(spelled[:SHOWN_WORDS]) + (f", … ({len(spelled)} words)" if len(spelled) > SHOWN_WORDS else "")
    text = f"the tokenizer of {model} spells {shown} in pieces, which a model of this size is slow to learn"
    return [Finding("warning", text, f"Use words of {file}, or a larger model.")]


def _pieces(tokenizer, word: str) -> int:
    """Return the number of tokens of a word, inside a text or at its beginning, whichever is smaller."""
    return min(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}"))
