"""A trained model plays an episode in the terminal, with its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..evaluation.agents import ChatActor
from ..evaluation.evaluate import load_panel, make_agent, make_chat_model
from ..trajectory import Trajectory
from ..utils.json import to_json
from ..utils.show import printable
from ..view.words import action_text
from .commands import evaluate
from .played import end_of, play, task_at, tasks_of


def play_with_model(options: Any) -> str:
    """Play the task that the options of `g2po play` name with a run's model, and return its steps and its end."""
    given = {"--environment": options.environment, "--tasks": options.tasks, "--max-turns": options.max_turns}
    given["--environment-options"] = to_json(options.environment_options) if options.environment_options else None
    words = [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    settings, _ = evaluate.read(["--model", options.model, *words])
    panel = load_panel(settings)
    row = task_at(tasks_of("", options.task) if options.task else panel.rows, options.line)
    limits = EpisodeLimits.of(settings, max_turns=panel.max_turns)
    with closing(make_chat_model(settings)) as chat:
        actor = ChatActor.of(chat, make_agent(settings, panel))
        sampling = Sampling.of(settings)
        played = play(
            panel.environment_factory, row, actor, limits, settings, sampling=sampling, seeds=[derived_seed(0, 0)]
        )
        tokenizer = chat.encode.tokenizer if chat.engine else None
    return "\n".join([*_steps(played, tokenizer), end_of(played)])


def _steps(played: Trajectory, tokenizer: Any) -> Iterator[str]:
    """Yield the texts of the steps; a prompt that continues the last one and its completion is shown from there."""
    read: list[int] = []
    for number, step in enumerate(played.steps, 1):
        ids = list(step.prompt_ids)
        new = ids[len(read) :] if read and ids[: len(read)] == read else ids
        read = [*ids, *step.completion_ids]
        text = tokenizer.decode(new) if ids else step.prompt or step.observation
        what = f", {len(ids)} tokens{', of which the new' if new is not ids else ''}" if ids else ""
        faults = [] if step.valid else ["not the required format"]
        faults += ["not among the listed actions"] if step.valid and step.admissible is False else []
        faults += ["cut off at max_completion_length"] if step.completion_truncated else []
        yield f"\n--- prompt {number}{what} ---\n{printable(text)}"
        yield f"--- completion, {len(step.completion_ids)} tokens ---\n{printable(step.completion or '')}"
        yield f"--- action{', '.join(['', *faults])} ---\n{printable(action_text(step))}"
