"""Ways to prompt a chat model for the next action.

- *direct*: the environment's prompts and requests, as in training.
- *ReAct* (Yao et al., 2023): one conversation per episode, in which each completion is a thought and an action.
- *Reflexion* (Shinn et al., 2023): ReAct in several trials. After a failed trial, the model writes what went wrong,
  and later trials read it.

The wording is g2po-trl's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..prompts.conversation import ChatRequest
from ..prompts.template import ParsedCompletion, PromptTemplate, last_steps, listed_spelling
from ..rollout.actor import prompt_contents
from ..rollout.conversations import request_of
from ..rollout.episode import Episode
from ..trajectory import Trajectory
from ..utils.options import require
from .panel import Panel

_ACTION = re.compile(r"^\s*action\s*:", re.IGNORECASE | re.MULTILINE)
_FENCE = re.compile(r"^\s*```\w*\s*\n(.*?)\n?```", re.DOTALL)

REACT_INSTRUCTIONS = """{about}

Answer each observation with a thought and one action, in this form:
Thought: what you know by now, and what should be done next
Action: {form}
Then stop: the answer to the action is shown to you."""

REFLECTION_REQUEST = """This was your attempt at a task, and it failed{why}. In at most four sentences, say at which \
point it went wrong and what to do instead next time. Be specific: name places, things and actions."""


@dataclass
class DirectAgent:
    """Prompting with the environment's template at every step, or with its chat requests, as in training.

    A model in this process is asked by training's own `PromptActor`; `ask` and `read` are for servers.

    Args:
        template: the prompt template, which also parses completions.
        history_length: number of past steps in a prompt.
        max_prompt_length: maximum tokens of a prompt; longer prompts are shortened as in training. Not for servers.
        history: `"window"` or `"conversation"`, as in training.
    """

    template: PromptTemplate
    history_length: int = 2
    max_prompt_length: int | None = None
    history: str = "window"
    name = "direct"
    trials = 1

    def ask(self, episode: Episode, notes: Sequence[str]) -> ChatRequest:
        template = self.template.of(episode.environment)
        if self.history == "conversation" or episode.observation.request is not None:
            return request_of(episode, template)
        return ChatRequest(template.messages(**prompt_contents(episode, self.history_length)))

    def read(self, completion: str, episode: Episode) -> ParsedCompletion:
        template = self.template.of(episode.environment)
        return template.read(completion, "", episode.observation.admissible_actions)


@dataclass
class ReActAgent:
    """Thoughts and actions in one conversation per episode, as in ReAct.

    Source: [arXiv:2210.03629](https://arxiv.org/abs/2210.03629).

    Args:
        panel: describes the environment and how an action is written.
        history_length: number of past steps in the conversation; older ones are left out of its middle.
    """

    panel: Panel
    history_length: int = 30
    name = "react"
    trials = 1

    def ask(self, episode: Episode, notes: Sequence[str]) -> ChatRequest:
        remedy = "the environment sends chat requests, which are prompts already; pass --agent direct"
        require(episode.observation.request is None, "agent", self.name, remedy)
        first, *later = [step.observation for step in episode.steps] + [episode.observation.text]
        opening = [f"Your task: {episode.task}"] if episode.task else []
        if notes:
            opening.append("What you noted after earlier attempts at it:\n- " + "\n- ".join(notes))
        opening.append(f"Observation: {first}")
        shown = last_steps(list(zip(episode.steps, later)), self.history_length)
        if len(shown) < len(later):
            opening.append(f"({len(later) - len(shown)} steps are left out here.)")
            opening += [] if shown else [f"Observation: {later[-1]}"]
        system = REACT_INSTRUCTIONS.format(about=self.panel.about, form=self.panel.action_form)
        conversation = [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(opening)}]
        for step, after in shown:
            conversation.append({"role": "assistant", "content": step.completion})
            conversation.append({"role": "user", "content": f"Observation: {after}"})
        if actions := episode.observation.admissible_actions:
            conversation[-1]["content"] += "\nActions you can take now:\n" + "\n".join(actions)
        return ChatRequest(conversation, stop=("\nObservation:",))

    def read(self, completion: str, episode: Episode) -> ParsedCompletion:
        """Return the text between the first "Action:" and the end of its line; code as a whole, without its fence.

        Reasoning, up to the last `</think>`, is ignored.
        """
        answer = completion.rpartition("</think>")[2]
        found = _ACTION.search(answer)
        rest = (answer[found.end() :] if found else (answer.strip().splitlines() or [""])[-1]).strip()
        fenced = _FENCE.match(rest) if found else None
        action = fenced.group(1) if fenced else rest
        action = (action if self.panel.multiline else action.split("\n")[0]).strip()
        spelled = listed_spelling(action, episode.observation.admissible_actions)
        return ParsedCompletion(action.lower() if self.panel.lower_case else spelled, bool(found and action))


@dataclass
class ReflexionAgent(ReActAgent):
    """ReAct, repeated after a failure with a reflection on it, as in Reflexion.

    Source: [arXiv:2303.11366](https://arxiv.org/abs/2303.11366).

    Args:
        trials: maximum number of attempts per task.
        memory: number of reflections that the next attempt reads, the latest ones.
    """

    trials: int = 3
    memory: int = 3
    name = "reflexion"

    def ask(self, episode: Episode, notes: Sequence[str]) -> ChatRequest:
        return super().ask(episode, notes[-self.memory :])

    def reflect(self, trajectory: Trajectory, notes: Sequence[str]) -> ChatRequest:
        """Return the request for a reflection on a failed trial."""
        lines = [f"Task: {trajectory.task}"] if trajectory.task else []
        for step in trajectory.steps:
            lines += [f"Observation: {step.observation}", (step.completion or f"Action: {step.action}").strip()]
        lines.append(f"Observation: {trajectory.final_observation}")
        why = ": it ran out of turns" if trajectory.outcome == "truncated" else ""
        earlier = "".join(f"\nAn earlier note of yours: {note}" for note in notes[-self.memory :])
        content = "\n".join(lines) + earlier + "\n\n" + REFLECTION_REQUEST.format(why=why)
        system = {"role": "system", "content": self.panel.about}
        return ChatRequest([system, {"role": "user", "content": content}])


Agent = DirectAgent | ReActAgent
