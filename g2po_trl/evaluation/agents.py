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
from dataclasses import dataclass, replace

from ..prompts.conversation import ChatRequest
from ..prompts.template import ParsedCompletion, PromptTemplate, last_steps, listed_spelling
from ..rollout.actor import prompt_contents
from ..rollout.conversations import request_of
from ..rollout.episode import Episode
from ..trajectory import Trajectory
from ..utils.options import require

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
        if self.history == "conversation" or episode.observation.request is not None:
            return request_of(episode, self.template)
        return ChatRequest(self.template.messages(**prompt_contents(episode, self.history_length)))

    def of(self, environment: str | None) -> DirectAgent:
        """Return the agent with the wording of an environment, by its name in a run with several."""
        return replace(self, template=self.template.of(environment))

    def read(self, completion: str, prompt_end: str, admissible_actions: Sequence[str] | None) -> ParsedCompletion:
        return self.template.read(completion, prompt_end, admissible_actions)


@dataclass
class ReActAgent:
    """Thoughts and actions in one conversation per episode, as in ReAct.

    Source: [arXiv:2210.03629](https://arxiv.org/abs/2210.03629).

    Args:
        about: description of the environment and of the possible actions.
        form: how an action is written.
        multiline: an action may have several lines (code). `False`: it ends with its line.
        lower_case: play actions in lower case. `False`: as listed, ignoring case, or as written.
        history_length: number of past steps in the conversation; older ones are left out of its middle.
    """

    about: str
    form: str = "the action, exactly as listed"
    multiline: bool = False
    lower_case: bool = False
    history_length: int = 30
    name = "react"
    trials = 1

    def of(self, environment: str | None) -> ReActAgent:
        """Return the agent itself: it has one wording."""
        return self

    def ask(self, episode: Episode, notes: Sequence[str]) -> ChatRequest:
        if episode.observation.request is not None:
            remedy = "the environment sends chat requests, which are prompts already; pass --agent direct"
            require(False, "agent", self.name, remedy)
        first, *later = [step.observation for step in episode.steps] + [episode.observation.text]
        opening = [f"Your task: {episode.task}"] if episode.task else []
        if notes:
            listed = "\n".join(f"- {note}" for note in notes)
            opening.append(f"What you noted after earlier attempts at it:\n{listed}")
        opening.append(f"Observation: {first}")
        shown = last_steps(list(zip(episode.steps, later)), self.history_length)
        if len(shown) < len(later):
            opening.append(f"({len(later) - len(shown)} steps are left out here.)")
            opening += [] if shown else [f"Observation: {later[-1]}"]
        system = REACT_INSTRUCTIONS.format(about=self.about, form=self.form)
        conversation = [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(opening)}]
        for step, after in shown:
            conversation.append({"role": "assistant", "content": step.completion})
            conversation.append({"role": "user", "content": f"Observation: {after}"})
        if actions := episode.observation.admissible_actions:
            conversation[-1]["content"] += "\nActions you can take now:\n" + "\n".join(actions)
        return ChatRequest(conversation, stop=("\nObservation:",))

    def read(
        self, completion: str, prompt_end: str, admissible_actions: Sequence[str] | None = None
    ) -> ParsedCompletion:
        """Return the text between the first "Action:" and the end of its line; code as a whole, without its fence.

        Reasoning, up to the last `</think>`, is ignored.
        """
        answer = completion.rpartition("</think>")[2]
        found = _ACTION.search(answer)
        rest = (answer[found.end() :] if found else (answer.strip().splitlines() or [""])[-1]).strip()
        fenced = _FENCE.match(rest) if found else None
        action = fenced.group(1) if fenced else rest
        action = (action if self.multiline else action.split("\n")[0]).strip()
        action = action.lower() if self.lower_case else listed_spelling(action, admissible_actions)
        return ParsedCompletion(action, bool(found and action))


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

    def reflect(self, trajectory: Trajectory, task: str, notes: Sequence[str]) -> ChatRequest:
        """Return the request for a reflection on a failed trial."""
        lines = [f"Task: {task}"] if task else []
        for step in trajectory.steps:
            lines += [f"Observation: {step.observation}", (step.completion or f"Action: {step.action}").strip()]
        lines.append(f"Observation: {trajectory.final_observation}")
        why = ": it ran out of turns" if trajectory.outcome == "truncated" else ""
        earlier = "".join(f"\nAn earlier note of yours: {note}" for note in notes[-self.memory :])
        content = "\n".join(lines) + earlier + "\n\n" + REFLECTION_REQUEST.format(why=why)
        return ChatRequest([{"role": "system", "content": self.about}, {"role": "user", "content": content}])


Agent = DirectAgent | ReActAgent
