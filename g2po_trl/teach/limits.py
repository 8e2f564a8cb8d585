"""What limits a taught model: the format, words, copying or planning? Its exam again, with one of them made perfect.

*copying*: each action is one of the listed ones, drawn by the model's probabilities of their completions; not where
these have thoughts. *planning*: the expert's action replaces each of the model's that has an effect, so that what is
left to the model is to write one. The larger gain in success names the limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Any

import torch

from g2po_trl.check.measure import spelled_words
from g2po_trl.engines.base import Completion
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.environments.tasks import task_id_of
from g2po_trl.prompts.conversation import Message, response_action
from g2po_trl.rollout.actor import Asked, PromptActor, PromptSession
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.teach.demonstrations import ExpertActor, ExpertSession
from g2po_trl.teach.exam import SuccessEvaluation
from g2po_trl.teach.experts import Expert, ExpertEnvironment, as_message, carried_answer, prose
from g2po_trl.trajectory import Step, Trajectory

UNLISTED = "Writing actions that exist, or planning,"  # the environment lists none, so that one cannot tell
GAIN = 0.1  # of success, from which a limit is named
FORMAT = 0.5  # of the completions; below it, the format is the limit
BATCH = 16  # completions that are scored together


@dataclass
class CopyingActor(PromptActor):
    """Writes one of the listed actions, drawn by the probabilities of their completions under `model`."""

    model: torch.nn.Module | None = None
    streams = False

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> CopyingSession:
        return CopyingSession(self, sampling, seeds, stats)


class CopyingSession(ExpertSession):
    """Session of a `CopyingActor`."""

    receive_steps = PromptSession.receive_steps

    def _generate(self) -> dict[int, Completion]:
        return {number: self._choose(one) for number, one in self.asked.items()}

    def _choose(self, one: Asked) -> Completion:
        listed = one.episode.observation.admissible_actions or ["look"]  # a dead end may list none
        completions = [self._text_ids(one, as_message(action)) for action in listed]
        inputs = self.actor.engine.image_inputs
        more = None if inputs is None else lambda rows: inputs(rows, [one.prompt.images] * len(rows))
        scores = completion_scores(self.actor.model, one.prompt.ids, completions, more)
        if self.sampling.temperature > 0:
            place = int(torch.multinomial((scores / self.sampling.temperature).softmax(0), 1))
        else:
            place = int(scores.argmax())
        return Completion(completions[place])


class PlanningActor(ExpertActor):
    """Replaces each action of the model that has an effect by the expert's."""

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> PlanningSession:
        return PlanningSession(self, sampling, seeds, stats)


@dataclass
class PlanningSession(PromptSession):
    """Session of a `PlanningActor`."""

    answers: dict[int, Any] = field(default_factory=dict)  # by the episode's number

    def ask(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            rng = random.Random(derived_seed(self.actor.seed, episode.number, len(episode.steps)))
            self.answers[episode.number] = self.actor.expert(episode, rng)
        super().ask(episodes)

    def _step(self, one: Asked, completion: Completion) -> Step:
        step, answer = super()._step(one, completion), self.answers[one.episode.number]
        has_effect = step.valid and step.admissible is not False and step.call in (None, "known", "readable")
        if has_effect and answer is not None:
            message = as_message(answer)
            step.action = response_action(message) if step.messages is not None else self._read(one, message)
        return step

    def _read(self, one: Asked, message: Message) -> str:
        """Return the action of an answer, which may be a whole completion."""
        template, about = self.actor.template, (one.prompt.text[-64:], one.episode.observation.admissible_actions)
        return template.read(template.write(prose(message), *about), *about).action


def has_thought(step: Step) -> bool:
    """Return whether the completion has a thought before its action. An action alone is then not what was taught."""
    thought, closed, _ = (step.completion or "").partition("</think>")
    return bool(closed and thought.replace("<think>", "").strip())


def completion_scores(
    model: torch.nn.Module,
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    more: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Return (C,) log-probabilities of completions of a prompt.

    Args:
        model: the model.
        prompt: token ids.
        completions: token ids of each.
        more: rows of token ids -> the model's inputs for the prompt's images. `None`: it has none.
    """
    scores = []
    for start in range(0, len(completions), BATCH):
        some = completions[start : start + BATCH]
        longest = max(map(len, some))
        rows = torch.tensor([[*prompt, *one, *[0] * (longest - len(one))] for one in some], device=model.device)
        with torch.inference_mode():  # padding follows a completion, and causal attention does not see it
            logits = model(input_ids=rows, **({} if more is None else more(rows))).logits
            logs = logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
        chosen = logs.gather(2, rows[:, len(prompt) :, None])[..., 0]
        inside = (
            torch.arange(longest, device=rows.device) < torch.tensor(list(map(len, some)), device=rows.device)[:, None]
        )
        scores.append((chosen * inside).sum(1))
    return torch.cat(scores).cpu()


def describe_limits(
    exam: SuccessEvaluation,
    model: torch.nn.Module,
    processing_class: Any,
    seed: int,
    last: Mapping[str, Any],
    shown: Sequence[Trajectory],
    expert: Expert | None,
    needs_worker: bool,
    model_name: str,
) -> str:
    """Return what limits a model that missed its target, in a few sentences.

    Args:
        exam: the evaluation.
        model: the taught model.
        processing_class: the model's tokenizer or processor.
        seed: of the exam.
        last: results of the last exam.
        shown: the demonstrations.
        expert: of an environment a function of its instance, of an agent one of an episode. `None`: there is none.
        needs_worker: the expert is of an environment.
        model_name: the base model, a folder or a Hub id.
    """
    valid, success = last["valid_action_ratio"], last["success_rate"]
    if valid < FORMAT:
        return (
            f"The format is the limit: {valid:.0%} of the completions have it, and the target is "
            f"{exam.target_valid:.0%}. Teach longer, or raise max_completion_length if completions are cut off."
        )
    words = spelled_words([step for one in shown for step in one.steps], model_name, with_actions=True)
    spelled = f" Words: {words[0].text}." if words else ""
    called = [bool((step.response or {}).get("tool_calls")) for one in shown for step in one.steps]
    shown_calls, calls = sum(called) / max(1, len(called)), last.get("tool_call_ratio")
    if calls is not None and calls < FORMAT * shown_calls:
        return (
            f"Tool calls are the limit: {calls:.0%} of the completions call a tool, and {shown_calls:.0%} of the "
            "demonstrated ones. Teach longer, use a larger model, or a chat template with shorter calls, as that of "
            f"g2po init --coding.{spelled}"
        )
    found = [f"success {success:.0%} as it is, with {valid:.0%} of the completions in the required format"]
    reached: dict[str, tuple[float, str]] = {}
    lists_actions = all(step.admissible_actions and step.messages is None for one in shown for step in one.steps)
    if lists_actions and not any(has_thought(step) for one in shown for step in one.steps):
        with EnvironmentPool(exam.environment_factory, exam.limits) as pool:
            summary, _ = exam.evaluate(model, processing_class, pool, seed, partial(CopyingActor, model=model))
        reached["Copying"] = summary["success_rate"], "if each action is one of the listed ones"
    if expert is not None:
        factory, answer, rows = exam.environment_factory, expert, exam.rows
        if needs_worker:
            factory, answer = partial(ExpertEnvironment, factory, expert), carried_answer
            rows = [
                {"task_id": task_id_of(row), "task": row, "seed": derived_seed(seed, number)}
                for number, row in enumerate(rows)
            ]
        planned = replace(exam, rows=rows)
        with EnvironmentPool(factory, exam.limits) as pool:
            summary, _ = planned.evaluate(
                model, processing_class, pool, seed, partial(PlanningActor, expert=answer, seed=seed)
            )
        name = "Planning" if lists_actions or any(called) else UNLISTED
        reached[name] = summary["success_rate"], "if the expert's action replaces each that has an effect"
    found += [f"{rate:.0%} {what}" for rate, what in reached.values() if not isnan(rate)]
    said = f"What limits it: {', '.join(found)}."
    gains = {name: rate - success for name, (rate, _) in reached.items() if not isnan(rate)}
    if len(gains) < len(reached):
        said += " Other episodes ended in environment errors, as those of a busy machine do."
    said += spelled
    best = max(gains, key=lambda name: gains[name], default=None)
    if best is not None and gains[best] > GAIN:
        remedy = {
            "Copying": "it does not write the listed actions: use words that it knows, a larger model, or teach more",
            "Planning": "it writes actions that exist, and not those that win: more episodes of the expert help",
            UNLISTED: "list the actions, use words that it knows, or teach more",
        }
        return f"{said} {best} is the limit: {remedy[best]}."
    return f"{said} Neither alone is the limit." if gains else said
