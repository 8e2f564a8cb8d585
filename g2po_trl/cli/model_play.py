"""A trained model plays an episode in the terminal, with its prompts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.setup import text_environment_factory
from ..environments.tasks import check_task_columns
from ..evaluation.agents import ChatActor
from ..evaluation.evaluate import load_panel, make_agent, make_chat_model
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..trajectory import Step
from ..utils.json import to_json
from ..utils.show import printable
from ..view.words import action_text
from .commands import evaluate
from .played import ended, task_at, tasks_of


class _Shown:
    """Wraps an actor or its session and prints each step as it arrives."""

    def __init__(self, inner: Any, tokenizer: Any):
        self.inner, self.tokenizer = inner, tokenizer
        self.read: list[int] = []  # tokens of the last prompt and its completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def session(self, *arguments: Any) -> _Shown:
        return _Shown(self.inner.session(*arguments), self.tokenizer)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        steps = self.inner.receive_steps(timeout)
        for episode, step in steps:
            if step is not None:
                self._print(len(episode.steps) + 1, step)
        return steps

    def _print(self, number: int, step: Step) -> None:
        ids, known = list(step.prompt_ids), len(self.read)
        continues = known > 0 and ids[:known] == self.read
        text = self.tokenizer.decode(ids[known:] if continues else ids) if ids else step.prompt or step.observation
        self.read = [*ids, *step.completion_ids]
        size = f", {len(ids)} tokens" if ids else ""
        new = ": what follows the last completion" if continues else ""
        print(f"\n--- prompt {number}{size}{new} ---\n{printable(text)}")
        print(f"--- completion, {len(step.completion_ids)} tokens ---\n{printable(step.completion or '')}")
        faults = [] if step.valid else ["not the required format"]
        faults += ["not among the listed actions"] if step.valid and step.admissible is False else []
        faults += ["cut off at max_completion_length"] if step.completion_truncated else []
        print(f"--- action{', '.join(['', *faults])} ---\n{printable(action_text(step))}", flush=True)


def play_with_model(options: Any) -> str:
    """Play the task that the options of `g2po play` name with a run's model, and return a line on how it ended."""
    given = {"--environment": options.environment, "--tasks": options.tasks, "--max-turns": options.max_turns}
    given["--environment-options"] = to_json(options.environment_options) if options.environment_options else None
    words = [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    settings, _ = evaluate.read(["--model", options.model, *words])
    panel = load_panel(settings)
    row = task_at(tasks_of("", options.task) if options.task else panel.rows, options.line)
    limits = EpisodeLimits.of(settings, max_turns=panel.max_turns)
    factory = text_environment_factory(panel.environment_factory, limits, panel.history, panel.prompt_template)
    check_task_columns(factory, row)
    one_worker = replace(PoolLimits.of(settings), num_environment_workers=1)
    with EnvironmentPool(factory, one_worker) as pool, closing(make_chat_model(settings)) as chat:
        actor = ChatActor.of(chat, make_agent(settings, panel))
        shown = _Shown(actor, getattr(getattr(chat, "encode", None), "tokenizer", None))
        ((played,), _) = Player(pool, shown, limits).play([row], Sampling.of(settings), seeds=[derived_seed(0, 0)])
    why = played.error or played.failure_reason
    final = f"\n--- end ---\n{printable(played.final_observation or '')}"
    end = ended(played.outcome, len(played.steps), played.reward)
    return f"{final}\n\n{end}{f': {printable(why)}' if why else ''}"
