"""Play an environment in the terminal: yourself, or a trained model.

    g2po play                                # environment.py here: shows what the model would observe
    g2po play environment.py --line 3        # also a run's folder; --task '{"seed": 7}'
    g2po play --model RUN                    # the model plays, with its prompts

Without `--model` you type the actions. `g2po view RUN --text --episode 3.2` prints a recorded episode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...engines.sampling import Sampling, derived_seed
from ...environments.causes import describe_failure
from ...environments.episode_limits import EpisodeLimits
from ...environments.pool.limits import PoolLimits
from ...environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ...environments.setup import played_as
from ...environments.several import player_of
from ...environments.tasks import check_task_columns
from ...evaluation.agents import ChatActor, TextActor
from ...rollout.actor import Actor
from ...rollout.episode import Episode
from ...rollout.player import Player
from ...trajectory import Step, Trajectory
from ...utils.errors import G2POError
from ...utils.json import to_json
from ...utils.options import Options, option, require
from ...utils.show import printable
from ...view.words import action_text
from ..parser import parse
from ..recipe_files import ENVIRONMENT, environment_and_tasks, tasks_of
from . import evaluate

HOW = "Type an action or its number; an empty line ends the episode."
TURNS = 50


@dataclass
class PlayOptions(Options):
    """Options of `g2po play`."""

    environment: str | None = option("as for g2po check, or a run's folder", None, positional=True, metavar="[FILE]")
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[dict[str, Any]] = option("the task, a dataset row as JSON", [], metavar="JSON")
    tasks: Path | None = option("a file of tasks; default: tasks.jsonl next to file.py", None, metavar="FILE")
    line: int = option("line of the task", 1)
    max_turns: int | None = option(f"default: the run's, else {TURNS}", None, within="[1, inf)")
    model: str | None = option("let this model play: a run's folder", None)
    environment_variables: list[str] = option("variables that the environment gets, secrets included", [])

    def of_line(self, tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the task to play."""
        exists = 1 <= self.line <= len(tasks)
        require(exists, "line", self.line, f"there are {len(tasks)} tasks; choose one of them")
        return dict(tasks[self.line - 1])


class Typed(TextActor):
    """The actions that a user types."""

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        return [self._answer(episode) for episode in episodes]

    def _answer(self, episode: Episode) -> Step | None:
        seen, actions = episode.observation, episode.observation.admissible_actions or ()
        if not episode.steps:
            print(f"{printable(episode.task)}\n{HOW}" if episode.task else HOW)
        elif reward := episode.steps[-1].reward:
            print(f"reward {reward:g}")
        print(f"\n[{episode.turns + 1}] {printable(seen.text)}")
        for image in seen.images:
            print("  an image of {} x {} pixels".format(*image.size))
        for number, action in enumerate(actions, 1):
            print(f"  {number:2} {printable(action)}")
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        chosen = actions[int(line) - 1] if line.isdecimal() and 1 <= int(line) <= len(actions) else line
        if not sys.stdin.isatty():
            print(printable(chosen))
        return episode.step(chosen, None) if chosen else episode.give_up("stopped")


def main(argv: Sequence[str] | None = None) -> None:
    """Play."""
    options, _ = parse((PlayOptions,), argv, command="g2po play", description=__doc__)
    if options.model is not None:
        played = play_with_model(options)
    else:
        name = options.environment or ENVIRONMENT
        made, tasks, run = environment_and_tasks(name, options.task, options.tasks)
        limits = EpisodeLimits(options.max_turns or run.get("play", {}).get("max_turns") or TURNS)
        made = partial(made, **options.environment_options) if options.environment_options else made
        made, row = player_of(made, options.of_line(tasks))
        played = play(played_as(made, limits, history="window")[0], row, Typed(), limits, options)
    number, why = len(played.steps), f": {played.failure_reason}" if played.failure_reason else ""
    end = f"{played.outcome} after {number} step{'s' * (number != 1)}, reward {played.reward:g}{why}"
    print(printable(f"\n{played.final_observation or ''}\n\n{end}"))


def play(
    factory: Callable, task: dict[str, Any], actor: Actor, limits: EpisodeLimits, of_pool: Any, **options: Any
) -> Trajectory:
    """Return an episode of a task. `of_pool` has fields of `PoolLimits`; `options` are those of `Player.play`."""
    check_task_columns(factory, task)
    with EnvironmentPool(factory, PoolLimits.of(of_pool, num_environment_workers=1)) as pool:
        ((played,), _) = Player(pool, actor, limits).play([task], **options)
    if not played.counted:
        failure = EnvironmentFailure(*played.error.split(": ", 1))
        raise G2POError(f"the environment {describe_failure(failure)}", "environment")
    return played


def play_with_model(options: PlayOptions) -> Trajectory:
    """Play with a run's model, and print the steps."""
    from ...evaluation.evaluate import load_panel, make_agent, make_chat_model  # torch, which is slow to import

    given = {"--environment": options.environment, "--tasks": options.tasks, "--max-turns": options.max_turns}
    given["--environment-options"] = to_json(options.environment_options) if options.environment_options else None
    words = [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    settings, _ = evaluate.read(["--model", options.model, *words])
    panel = load_panel(settings)
    row = options.of_line(tasks_of("", options.task) if options.task else panel.rows)
    limits = EpisodeLimits.of(settings, max_turns=panel.max_turns)
    with closing(make_chat_model(settings)) as chat:
        actor, seeds = ChatActor.of(chat, make_agent(settings, panel)), [derived_seed(0, 0)]
        played = play(
            panel.environment_factory, row, actor, limits, settings, sampling=Sampling.of(settings), seeds=seeds
        )
        decode = chat.encode.tokenizer.decode if chat.engine else None
    for number, step in enumerate(played.steps, 1):
        prompt = decode(step.prompt_ids) if step.prompt_ids else step.prompt or step.observation
        fault = "" if step.valid else ", not the required format"
        fault = ", not among the listed actions" if step.valid and step.admissible is False else fault
        print(f"\n--- prompt {number}, {len(step.prompt_ids)} tokens ---\n{printable(prompt)}")
        cut = ", cut off at max_completion_length" if step.completion_truncated else ""
        print(f"--- completion, {len(step.completion_ids)} tokens{cut} ---\n{printable(step.completion or '')}")
        print(f"--- action{fault} ---\n{printable(action_text(step))}")
    return played
