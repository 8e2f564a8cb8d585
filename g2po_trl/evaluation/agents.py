"""Ways to prompt a chat model for the next action, in g2po-trl's own words, and the actors that ask it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..engines.sampling import Sampling, derived_seed
from ..environments.contract import Observation
from ..prompts.conversation import ChatRequest, response_action, since_last_completion
from ..prompts.template import ParsedCompletion, PromptTemplate, last_steps, listed_spelling
from ..prompts.tool_calls import call_in
from ..rollout.actor import PromptActor, prompt_contents
from ..rollout.conversations import request_of
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..runs.run_json import FILE, load_prompt, read_run
from ..trajectory import Step, Trajectory
from ..utils.errors import G2POError
from ..utils.options import require
from .panel import Panel

if TYPE_CHECKING:
    from .chat_models import ChatCompletion, ChatModel

_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL
_ACTION = re.compile(r"^\s*action\s*:\s*(?:```\w*\s*\n(?P<code>.*?)\n?```|(?P<text>.*))", _FLAGS)
_MEMORY = 3  # reflections that a trial reads, the latest ones

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

    A model in this process is asked by training's own `PromptActor`, which explains the fields; `ask` and `read` are
    for servers, which do not regard `max_prompt_length`.
    """

    template: PromptTemplate
    history_length: int = 2
    max_prompt_length: int | None = None
    history: str = "window"
    trials = 1

    def ask(self, episode: Episode) -> ChatRequest:
        template = self.template.of(episode.environment)
        if self.history == "conversation" or episode.observation.request is not None:
            return request_of(episode, template)
        return ChatRequest(template.messages(**prompt_contents(episode, self.history_length)))

    def read(self, completion: str, episode: Episode) -> ParsedCompletion:
        return self.template.of(episode.environment).read(completion, "", episode.observation.admissible_actions)


@dataclass
class ReActAgent:
    """Thoughts and actions in one conversation per episode, as in ReAct; with several trials, as in Reflexion.

    After a failed trial the model writes what went wrong, and later trials read it. Sources:
    [arXiv:2210.03629](https://arxiv.org/abs/2210.03629), [arXiv:2303.11366](https://arxiv.org/abs/2303.11366).
    """

    panel: Panel  # describes the environment and how an action is written
    history_length: int = 30  # steps in the conversation; older ones are left out of its middle
    trials: int = 1
    notes: Sequence[Sequence[str]] = ()  # reflections on earlier trials, by the episode's number

    def ask(self, episode: Episode) -> ChatRequest:
        remedy = "the environment sends chat requests, which are prompts already; pass --agent direct"
        require(episode.observation.request is None, "agent", "react", remedy)
        first, *later = [*(step.observation for step in episode.steps), episode.observation.text]
        opening = [f"Your task: {episode.task}"] if episode.task else []
        if notes := self.notes[episode.number][-_MEMORY:] if self.notes else ():
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
        answer = completion.rpartition("</think>")[2].strip()
        found = _ACTION.search(answer)
        action = (found["code"] or found["text"] or "") if found else answer.rpartition("\n")[2]
        action = (action if self.panel.multiline else action.partition("\n")[0]).strip()
        spelled = listed_spelling(action, episode.observation.admissible_actions)
        return ParsedCompletion(action.lower() if self.panel.lower_case else spelled, bool(found and action))

    def reflect(self, trajectory: Trajectory, notes: Sequence[str]) -> ChatRequest:
        """Return the request for a reflection on a failed trial."""
        lines = [f"Task: {trajectory.task}"] if trajectory.task else []
        for step in trajectory.steps:
            lines += [f"Observation: {step.observation}", step.completion.strip()]
        lines.append(f"Observation: {trajectory.final_observation}")
        lines += [f"An earlier note of yours: {note}" for note in notes[-_MEMORY:]]
        why = ": it ran out of turns" if trajectory.outcome == "truncated" else ""
        content = "\n".join([*lines, "", REFLECTION_REQUEST.format(why=why)])
        return ChatRequest([{"role": "system", "content": self.panel.about}, {"role": "user", "content": content}])


Agent = DirectAgent | ReActAgent


class TextActor:
    """Base of actors without token ids, which answer all waiting episodes at once. It is its own session."""

    is_collective = streams = False
    asked: Sequence[Episode] = ()

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> TextActor:
        self.sampling, self.seeds, self.asked = sampling, seeds, ()
        return self

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked = [*self.asked, *episodes]

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        episodes, self.asked = self.asked, ()
        return list(zip(episodes, self.answer(episodes), strict=True)) if episodes else []

    def answer(self, episodes: Sequence[Episode]) -> Iterable[Step | None]:
        """Return the next step of each episode, or `None` for one that has been ended."""
        raise NotImplementedError


@dataclass
class ChatActor(TextActor):
    """An actor that asks a chat model by text."""

    chat: ChatModel
    agent: Agent

    @staticmethod
    def of(chat: ChatModel, agent: Agent) -> ChatActor | PromptActor:
        """Return training's own actor where it can play: a model in this process, with the agent "direct"."""
        if chat.engine is None or isinstance(agent, ReActAgent):
            return ChatActor(chat, agent)
        settings = agent.history_length, agent.max_prompt_length, agent.history, chat.longest
        return PromptActor(chat.engine, chat.encode, agent.template, *settings)

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        for episode in episodes:
            remedy = "this model reads text only; evaluate a vision-language checkpoint, with --agent direct"
            require(not episode.observation.images, "images", len(episode.observation.images), remedy)
        requests = list(map(self.agent.ask, episodes))
        seeds = [derived_seed(self.seeds[episode.number], len(episode.steps)) for episode in episodes]
        return list(map(self._step, episodes, requests, self.chat.generate(requests, self.sampling, seeds)))

    def _step(self, episode: Episode, request: ChatRequest, completion: ChatCompletion) -> Step | None:
        if completion.error:
            return episode.give_up(f"context overflow: {completion.error}")
        episode.reported.append((completion.prompt_tokens, completion.completion_tokens))
        text, fields = completion.text, {"completion_truncated": not completion.complete}
        if episode.observation.request is not None:
            action, valid = response_action(completion.message), request.is_valid(completion.message)
            fields["call"] = request.call_in(completion.message, text, valid)
            fields["messages"] = since_last_completion(request.messages) if episode.steps else request.messages
        else:
            action, valid = self.agent.read(text, episode)
            fields["prompt"] = request.messages[-1]["content"]
            if isinstance(self.agent, DirectAgent):
                fields["call"] = call_in(self.agent.template.of(episode.environment), action, valid)
        return episode.step(action, text, valid=valid, **fields)


class TrainedAgent:
    """Chooses actions as in an evaluation of the model's run. `restart` begins another episode."""

    def __init__(self, actor: PromptActor, sampling: Sampling):
        self.actor, self.sampling, self.episode, self._number = actor, sampling, Episode(""), 0

    def restart(self) -> None:
        """Forget the episode so far."""
        self.episode, self._number = Episode(""), self._number + 1

    def act(self, observation: str | Observation) -> str:
        """Return the action for the next observation; for one with a chat request, the assistant's message as JSON."""
        episode = self.episode
        episode.observation = Observation(observation) if isinstance(observation, str) else observation
        episode.task = episode.task or episode.observation.task or ""
        session = self.actor.session(self.sampling, [derived_seed(0, self._number)], RolloutStats())
        session.ask([episode])
        if episode.outcome is not None:
            raise G2POError(episode.failure_reason or episode.error, "observation", observation)
        ((_, step),) = session.receive_steps(0.0)
        episode.steps.append(step)
        return step.action


def load_agent(folder: str | Path) -> TrainedAgent:
    """Return the agent of a run's `output_dir`, or of a model on the Hub that was pushed with its run.json."""
    from huggingface_hub import snapshot_download

    from .chat_models import load_local  # with torch, which is slow to import

    folder = str(folder) if Path(folder).is_dir() else snapshot_download(str(folder))
    run = read_run(folder)
    require("play" in run, "folder", folder, f"it holds no {FILE} of a run; pass its output_dir")
    play = run["play"]
    remedy = "its completions follow a regex, which vLLM alone does; use `g2po evaluate`"
    require(not play.get("vllm_structured_outputs_regex"), "folder", folder, remedy)
    template = play.get("chat_template_kwargs"), play.get("generation_kwargs"), play.get("autocast")
    chat = load_local(folder, *template, dtype=play.get("dtype") or "auto")
    lengths = {name: play[name] for name in ("history_length", "max_prompt_length", "history") if name in play}
    actor = PromptActor(chat.engine, chat.encode, load_prompt(run["prompt"]), context_length=chat.longest, **lengths)
    return TrainedAgent(actor, Sampling(**{one.name: play[one.name] for one in fields(Sampling) if one.name in play}))
