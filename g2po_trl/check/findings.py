"""Findings of `g2po check`: kinds with their wording in one table, levels, and facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from ..runs.verdict import Cause

LEVELS = ("error", "warning", "ok")
_EPISODES = "{who} succeed in {successes} of {episodes} episodes; {ended} end within {turns} turns"
_VISITS = "{kind}episodes of a task visit a state {visits:.1f} times on average; {alone:.0%} of the steps "
_VISITS += "are in a state visited once"
_EXPERT = "the expert succeeds in {successes} of {episodes} episodes within {turns} turns (median {steps:g})"
_EXPERT += "; others: {reasons}"
_KEYS = "calls in a state of another episode: {used:.0%} by the key in use; {others}"
_LENGTHS = "prompts have at most {longest} tokens, completions {written:g} (median); {cut:.0%} of them reach the limit"
_NO_EFFECT = "{count} of {listed} admissible actions get the response to an invalid action ({response!r}): {actions}"
_NOT_REPLAYED = "the same actions do not lead to the same states {where}: {difference}"
_OWN_STATE = "Seed a random.Random in reset (not by hash()), keep state in self, and run programs at one path."
_TEACH = "or fine-tune it on demonstrations (g2po teach)."
_TRAINED = f"Use a model that was trained to call tools, {_TEACH}"


class Wording(NamedTuple):
    """A kind's text with facts in braces, its remedy and usual level. `is_final`: nothing would be learned."""

    text: str
    remedy: str = ""
    level: str = "warning"
    is_final: bool = False


_error, _ok = partial(Wording, level="error"), partial(Wording, level="ok")


class Kind(Enum):
    """What a finding is about, with its wording."""

    # The contract of an environment, and what its workers do
    REFUSED = _error("{error}")
    CONSTRUCTION = _error("constructing {name} raised {error}{where}", "Bind its arguments with functools.partial.")
    RAISED_IN_RESET = _error("{name} raised {error} in reset{where}", "Remove tasks that cannot be played.")
    RAISED_IN_STEP = _error("{name} raised {error} on the action {action}{where}", "Return an observation instead.")
    RANDOM_RESET = _error("{name}.reset gave {first!r} and then {then!r} for one task", "Seed it from the task.")
    NO_EFFECT = Wording(_NO_EFFECT, "List only executable actions, or describe their effect.")
    FAILED = _error("{who} {failure} ({count} of {failures} failed episodes)")
    NOT_REPLAYED = Wording(_NOT_REPLAYED, _OWN_STATE)
    CONTRACT_KEPT = _ok("keeps the contract; the same actions lead to the same states, also next to other episodes")
    LIMIT = Wording("{count} of {episodes} episodes fail by the {limit}", "Raise it, or let episodes end earlier.")
    # Observations
    NO_TASK = Wording("later prompts may lack the goal", "Set Observation.task in reset, or repeat the goal.")
    NO_ACTIONS = Wording("it lists no actions: random episodes play 'look'", "List or describe them in the prompt.")
    # States
    RECURRENCE = _ok(f"{_VISITS}: there is a graph to learn from")
    RARE_STATES = Wording(f"{_VISITS}: G2PO is little more than GRPO", "Give equal states equal keys, or use GRPO.")
    COUNTER = Wording("{counter}", "Leave counters and clocks out of the state_key, or use state_key_ignores.")
    KEYS = Wording(_KEYS, "Try --agent-state-key g2po_trl.prompts.state_keys:normalised_key.")
    PARTS = Wording(_KEYS, "Try state_key: {best} in config.yaml.")
    # Rewards
    OUTCOMES = _ok(f"{_EPISODES}; rewards from {{low:g}} to {{high:g}}")
    ALL_WON = Wording(f"{_EPISODES}: there is nothing to learn", "Make the tasks harder.", is_final=True)
    PAID_TRUNCATED = Wording(f"{_EPISODES}; {{paid}} truncate with a reward", "End successes with terminated=True.")
    EQUAL_REWARDS = Wording(f"{_EPISODES}, all with reward {{low:g}}", "Begin with easier tasks.", is_final=True)
    # The environment's faults of the diagnosis that the end of training and reports read
    DIFFERENT_STARTS = Wording(*Cause.DIFFERENT_STARTS.wording)
    CONTEXT_OVERFLOW = Wording(*Cause.CONTEXT_OVERFLOW.wording, is_final=True)
    SINGLE_STATE = Wording(*Cause.SINGLE_STATE.wording)
    NO_REWARD = Wording(*Cause.NO_REWARD.wording)
    # Agents
    ONE_CALL = Wording("calls the model once per episode: there are no steps to compare, so G2PO equals GRPO")
    RAISED_IN_AGENT = Wording("raises {error}{where} in {count} of {episodes} episodes", "Tell the model instead.")
    TOO_MANY_CALLS = Wording("asks for more than {turns} calls in {count} of {episodes} episodes", "Raise max_turns.")
    REFUSED_REQUESTS = Wording("sends requests that are refused in {count} of {episodes} episodes: {refusal}")
    # Completions of a model
    LENGTHS = Wording(_LENGTHS, "Raise max_completion_length (and the agent's max_tokens), or ask for less.")
    FORMAT = Wording("{count} of {number} completions have the required format", f"Read some (g2po view); {_TEACH}")
    ADMISSIBLE = Wording("{count} of {number} actions are among the listed ones", f"Use a larger model, {_TEACH}")
    TOOL_CALLS = Wording("{count} of {number} completions call a tool", _TRAINED)
    READABLE_CALLS = Wording("{count} of {number} tool calls can be parsed", _TRAINED)
    KNOWN_CALLS = Wording("{count} of {number} parsed calls are of a known tool", _TRAINED)
    SPELLED_WORDS = Wording("the tokenizer of {model} splits {words}, which is slow to learn", "Use other words.")
    # Experts
    EXPERT = _ok(_EXPERT, "Raise max_turns: with one action more, the episode fails.")
    EXPERT_FAILS = Wording(_EXPERT, "Correct the expert or the reward, or raise max_turns.", is_final=True)

    def found(self, level: str | None = None, /, **facts: Any) -> Finding:
        """Return a finding of this kind, at its usual level unless another is given."""
        return Finding(self, level or self.value.level, facts)

    def judged(self, fits: bool, /, **facts: Any) -> Finding:
        """Return a finding that is "ok" if it `fits`, and else a warning."""
        return self.found("ok" if fits else "warning", **facts)


@dataclass(frozen=True)
class Finding:
    """A finding of `g2po check`; `facts` are the numbers and texts that the wording of its kind names."""

    kind: Kind
    level: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None  # in a run with several

    @property
    def text(self) -> str:
        """The wording with the facts, and the remedy."""
        facts = dict(self.facts)
        for name, value in facts.items():
            shares = [f"{share:.0%} by {key}" for key, share in value.items()] if isinstance(value, dict) else value
            facts[name] = ", ".join(map(str, shares)) or "none" if isinstance(shares, (list, tuple)) else shares
        remedy = "" if self.level == "ok" else self.kind.value.remedy
        return f"{self.kind.value.text}. {remedy}".format(**facts).rstrip()

    def __str__(self) -> str:
        return f"{self.level:9} {f'{self.environment}: ' if self.environment else ''}{self.text}"


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether something must be corrected before training."""
    return any(finding.level == "error" for finding in findings)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by level, and of those that differ in their task or number alone the first."""
    distinct: dict[tuple, Finding] = {}
    for finding in findings:
        facts = finding.facts
        subject = next((facts[name] for name in ("where", "failure", "limit", "error") if facts.get(name)), None)
        distinct.setdefault((finding.kind, finding.level, finding.environment, subject), finding)
    return sorted(distinct.values(), key=lambda finding: LEVELS.index(finding.level))


def learns_nothing(findings: Iterable[Finding]) -> bool:
    """Return whether training would learn nothing, in any of the environments."""
    findings = list(findings)
    final = [finding for finding in findings if finding.kind.value.is_final and finding.level != "ok"]
    return bool(final) and {one.environment for one in final} == {one.environment for one in findings}
