"""Random episodes, and the findings of `g2po check` about whether a model can learn in the environment."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..credit.graph import StateGraph
from ..environments.adapters.trl_tools import random_call
from ..environments.pool.pool import EnvironmentFailure
from ..environments.pool.single import EnvironmentFailedError, RemoteProcessEnvironment
from ..rollout.episode import Episode
from ..trajectory import Trajectory

LEVELS = ("error", "warning", "ok")
SLOW_STEP = 0.2  # seconds
LONG_TEXT = 8_000  # characters, about 2,000 tokens: the default max_prompt_length
SHORT_TEXT = 60  # characters
MANY_TURNS = 3  # at which a short text is seen in episodes of a task


@dataclass(frozen=True)
class Finding:
    """A finding. `level`: "error", "warning" or "ok"."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:9} {self.text}"


@dataclass
class RandomRollouts:
    """Random episodes, their times and properties of the environment.

    `paid_after_the_end`: the reward of a step after the end of an episode; `None` if no episode has ended.
    """

    groups: list[list[Trajectory]]
    reset_seconds: list[float]
    step_seconds: list[float]
    has_task: bool
    lists_actions: bool
    failures: list[EnvironmentFailure] = field(default_factory=list)
    paid_after_the_end: float | None = None


def play_at_random(
    environment: RemoteProcessEnvironment,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
) -> RandomRollouts:
    rollouts = RandomRollouts([], [], [], True, True)
    for number, task in enumerate(tasks):
        group = []
        for _ in range(episodes):
            try:
                group.append(_episode(environment, task, str(number), turns, rng, rollouts))
            except EnvironmentFailedError as failed:
                rollouts.failures.append(failed.failure)
                if failed.failure.kind != "exception" and failed.failure.kind != "invalid":
                    return rollouts  # each further episode may take as long as the time limit
        if group:
            rollouts.groups.append(group)
    return rollouts


def _episode(
    environment: RemoteProcessEnvironment,
    task: dict[str, Any],
    name: str,
    turns: int,
    rng: random.Random,
    rollouts: RandomRollouts,
) -> Trajectory:
    """Play one random episode, and record its times and other properties in `rollouts`."""
    started = time.perf_counter()
    observation = environment.reset(**task)
    rollouts.reset_seconds.append(time.perf_counter() - started)
    rollouts.has_task &= bool(observation.task)
    episode = Episode(name)
    episode.open(observation)
    for _ in range(turns):
        if environment.tool_schemas is not None:
            action = random_call(environment.tool_schemas, rng)
        else:
            listed = episode.observation.admissible_actions
            rollouts.lists_actions &= listed is not None
            action = rng.choice(listed or ["look"])
        episode.steps.append(episode.step(action, None))
        started = time.perf_counter()
        result = environment.step(action)
        rollouts.step_seconds.append(time.perf_counter() - started)
        episode.advance(result)
        if episode.outcome is not None:
            if rollouts.paid_after_the_end is None:
                rollouts.paid_after_the_end = result.info["paid_after_the_end"]
            break
    return episode.trajectory()


def episode_findings(rollouts: RandomRollouts) -> list[Finding]:
    """Return findings about speed, length of texts and steps after the end."""
    return [*_speed(rollouts), *_texts(rollouts), *_after_the_end(rollouts)]


def learning_findings(rollouts: RandomRollouts, episodes: int, turns: int) -> list[Finding]:
    """Return findings about complete groups with listed actions: recurring states and differing outcomes."""
    trajectories = [t for group in rollouts.groups for t in group]
    return [*graph_findings(rollouts.groups, episodes), *outcome_findings(trajectories, turns)]


def constant_findings(groups: list[list[Trajectory]]) -> list[Finding]:
    """Return a finding if all observations of each task are one, whose episodes played actions that are not listed."""
    steps = [step for group in groups for trajectory in group for step in trajectory.steps]
    starts = sum(len(group) for group in groups)
    if len(steps) == starts or any(len({s.key for t in group for s in t.steps}) > 1 for group in groups):
        return []
    return [
        Finding(
            "warning",
            f"all {len(steps)} observations of the random episodes are the same ({steps[0].observation[:60]!r}), and "
            "one state. If an action that is played here can change anything, the model does not see it: show in the "
            "observation what changes, and list the actions.",
        )
    ]


def _after_the_end(rollouts: RandomRollouts) -> list[Finding]:
    if not rollouts.paid_after_the_end:
        return []
    return [
        Finding(
            "warning",
            f"a step after the end returns a reward of {rollouts.paid_after_the_end:g}: training never plays one, but "
            "code that calls the environment directly may. Return 0 in step once the episode has ended.",
        )
    ]


def _speed(rollouts: RandomRollouts) -> list[Finding]:
    step, reset = median(rollouts.step_seconds), median(rollouts.reset_seconds)
    text = f"a step takes {1000 * step:.3g} ms, a reset {1000 * reset:.3g} ms (medians, to a worker and back)."
    if step > SLOW_STEP:
        remedy = "cache what the environment recomputes, or raise num_environment_workers on more cores."
        return [Finding("warning", f"{text} That is slow: {remedy}")]
    return [Finding("ok", text)]


def _texts(rollouts: RandomRollouts) -> list[Finding]:
    findings = []
    longest = max((len(step.observation) for group in rollouts.groups for t in group for step in t.steps), default=0)
    if longest > LONG_TEXT:
        findings.append(
            Finding(
                "warning",
                f"an observation has {longest} characters: prompts beyond max_prompt_length tokens lose their middle. "
                "Shorten it, or raise max_prompt_length.",
            )
        )
    if not rollouts.has_task:
        findings.append(
            Finding(
                "warning",
                "reset gives no Observation.task: after the first step only the history shows the goal. Set it, or "
                "repeat the goal in every observation.",
            )
        )
    if not rollouts.lists_actions:
        findings.append(
            Finding(
                "warning",
                "no admissible actions are listed: random episodes play 'look', and the model has to know the "
                "possible actions. List them in the observation or describe them in the prompt template.",
            )
        )
    return findings


_KEYS_REMEDY = (
    "Give equal states an equal state_key (leave out counters and clocks), or see the options state_key and "
    "state_key_ignores."
)


def graph_findings(
    groups: list[list[Trajectory]], episodes: int, remedy: str = _KEYS_REMEDY, kind: str = "random "
) -> list[Finding]:
    """Return findings about how often states recur in groups of `episodes` of a kind, and what they hide.

    `remedy`: if they hardly recur.
    """
    return [*_recurring(groups, episodes, remedy, kind), *_short_texts(groups)]


def _short_texts(groups: list[list[Trajectory]]) -> list[Finding]:
    """Return a finding about the short text that is the state of most turns, if it hides where an episode is.

    It does if the same action leads from it to different states, or if no action was played twice in it.
    """
    worst: tuple[int, str, set[int], bool] = (0, "", set(), False)
    for group in groups:
        turns, nexts, texts = defaultdict(list), defaultdict(list), {}
        for trajectory in group:
            for turn, step in enumerate(trajectory.steps, 1):
                after = trajectory.steps[turn].key if turn < len(trajectory.steps) else None
                turns[step.key].append(turn)
                texts[step.key] = step.observation
                if after is not None or trajectory.outcome != "truncated":
                    nexts[step.key, step.compared_action].append(after)
        for key, seen in turns.items():
            again = [set(after) for (state, _), after in nexts.items() if state == key and len(after) > 1]
            hides = any(len(after) > 1 for after in again)
            if len(texts[key]) <= SHORT_TEXT and len(set(seen)) >= MANY_TURNS and (hides or not again):
                worst = max(worst, (len(seen), texts[key], set(seen), hides), key=lambda one: one[0])
    visits, text, at, hides = worst
    if not visits:
        return []
    which = ", ".join(map(str, sorted(at)[:5])) + (", …" if len(at) > 5 else "")
    leads = ", and the same action leads from it to different states" if hides else ""
    return [
        Finding(
            "warning",
            f"the short text {text!r} is one state in {visits} steps, at turns {which}{leads}: if these are different "
            "situations, they are compared as one. Add what is missing to the text or to the state_key.",
        )
    ]


def _recurring(groups: list[list[Trajectory]], episodes: int, remedy: str, kind: str) -> list[Finding]:
    graph = StateGraph.from_groups(groups)
    statistics = graph.statistics()
    size, alone = statistics["mean_group_size"], statistics["singleton_step_fraction"]
    text = (
        f"{episodes} {kind}episodes of a task visit a state {size:.1f} times on average; {100 * alone:.0f} % of the "
        "steps are in a state visited once"
    )
    if graph.num_nodes == len(groups) and graph.num_steps > len(groups):
        return [
            Finding("warning", f"{text}: a task has one state only. Let state_key or the text distinguish states.")
        ]
    if alone > 0.5:
        return [
            Finding(
                "warning",
                f"{text}: most actions are compared with no other, and G2PO is little more than GRPO. {remedy}",
            )
        ]
    return [Finding("ok", f"{text}: there is a graph to learn from.")]


def outcome_findings(
    trajectories: list[Trajectory],
    turns: int,
    what: str = "random actions",
    who: str = "a model that acts randomly learns",
) -> list[Finding]:
    """Return a finding about successes and rewards of `what`, with `who` learns nothing if rewards are equal."""
    successes = sum(t.success for t in trajectories)
    ended = sum(t.outcome != "truncated" for t in trajectories)
    text = f"{what} succeed in {successes} of {len(trajectories)} episodes; {ended} end within {turns} turns"
    rewards = {t.reward for t in trajectories}
    if successes == len(trajectories):
        return [
            Finding(
                "warning",
                f"{text}: there is nothing to learn, since a group whose episodes all succeed has no advantages. Make "
                "the tasks harder: more steps to the goal, or wrong actions that end an episode.",
            )
        ]
    if len(rewards) == 1:
        return [
            Finding(
                "warning",
                f"{text}, all with reward {rewards.pop():g}: {who} nothing here. Start "
                "from one that sometimes succeeds, or from easier tasks.",
            )
        ]
    return [Finding("ok", f"{text}; rewards from {min(rewards):g} to {max(rewards):g}.")]
