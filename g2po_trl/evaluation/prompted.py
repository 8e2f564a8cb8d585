"""Ways to prompt a chat model for the next action, in g2po-trl's own words: ReAct and Reflexion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..engines.sampling import Sampling
from ..environments.contract import Observation
from ..prompts.template import ParsedCompletion, PromptTemplate, parse_plain
from ..rollout.actor import Actor
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..rollout.stats import RolloutStats
from ..trajectory import Trajectory
from .panel import Panel

OBSERVED = "\nObservation:"  # ends a completion: the environment answers, not the model
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL
_ACTION = re.compile(r"^\s*action\s*:\s*(?:```\w*\s*\n(?P<code>.*?)\n?```|(?P<line>[^\n]*))", _FLAGS)
_MEMORY = 3  # reflections that a trial reads, the latest ones
_INSTRUCTIONS = """{about}

Answer each observation with a thought and one action, in this form:
Thought: what you know by now, and what should be done next
Action: {form}
Then stop: the answer to the action is shown to you."""
_REFLECTION = """This was your attempt at a task, and it failed{why}. In at most four sentences, say at which point \
it went wrong and what to do instead next time. Be specific: name places, things and actions."""
_NOTED = "What you noted after earlier attempts at it:"


def react_template(panel: Panel, lists_actions: bool) -> PromptTemplate:
    """Return the prompts of ReAct ([arXiv:2210.03629](https://arxiv.org/abs/2210.03629)), for conversations."""
    seen = "Observation: {observation}" + "\nActions you can take now:\n{actions}" * lists_actions
    parse = partial(parse_react, lower_case=panel.lower_case)
    system = _INSTRUCTIONS.format(about=panel.about, form=panel.action_form)
    return PromptTemplate("Your task: {task}\n\n" + seen, seen, turn=seen, system=system, parse_completion=parse)


def parse_react(completion: str, prompt_end: str = "", lower_case: bool = False) -> ParsedCompletion:
    """Return the text between the first "Action:" and the end of its line; code in a fence as a whole.

    Reasoning, up to the last `</think>`, is ignored.
    """
    answer = completion.rpartition("</think>")[2].partition(OBSERVED)[0].strip()
    found = _ACTION.search(answer)
    action = (found["code"] or found["line"] or "").strip() if found else answer.rpartition("\n")[2]
    return ParsedCompletion(action.lower() if lower_case else action, bool(found and action))


@dataclass
class Trial(Episode):
    """An episode whose task ends with the latest notes on earlier trials."""

    notes: Sequence[str] = ()

    def open(self, seen: Any) -> None:
        super().open(seen)
        self.task = "\n- ".join([f"{self.task}\n\n{_NOTED}", *self.notes[-_MEMORY:]]) if self.notes else self.task


@dataclass
class TrialPlayer(Player):
    """A player for trials of tasks, as in Reflexion ([arXiv:2303.11366](https://arxiv.org/abs/2303.11366)).

    `notes` has a list of reflections for each task.
    """

    notes: Sequence[Sequence[str]] = ()

    def episode(self, task: dict[str, Any], number: int) -> Trial:
        return Trial(**vars(super().episode(task, number)), notes=self.notes[number])


def reflect(
    actor: Actor, about: str, failed: Sequence[Trajectory], sampling: Sampling, seeds: Sequence[int]
) -> dict[int, str]:
    """Return what the model notes on failed trials, by their numbers, except for trials that exceed its context."""
    template = PromptTemplate("{observation}", "", system=about, parse_completion=parse_plain)
    session = replace(actor, template=template, history="window", max_prompt_length=None)
    session = session.session(sampling, seeds, RolloutStats())
    steps = []
    with actor.rollout():
        session.ask([Episode(t.task_id, n, Observation(_reflection_on(t))) for n, t in enumerate(failed)])
        while session.waiting:
            steps += session.receive_steps(1.0)
    return {episode.number: " ".join(step.completion.split()) for episode, step in steps if step is not None}


def _reflection_on(trajectory: Trajectory) -> str:
    lines = [f"Task: {trajectory.task}"] if trajectory.task else []
    for step in trajectory.steps:
        lines += [f"Observation: {step.observation}", step.completion.partition(OBSERVED)[0].strip()]
    why = ": it ran out of turns" if trajectory.outcome == "truncated" else ""
    return "\n".join([*lines, f"Observation: {trajectory.final_observation}", "", _REFLECTION.format(why=why)])
