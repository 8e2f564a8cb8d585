"""Play an environment in the terminal: yourself, or a trained model.

    g2po play                                # environment.py here: shows what the model would observe
    g2po play environment.py --line 3        # also a run's folder; --task '{"seed": 7}'
    g2po play --model RUN                    # the model plays, with its prompts

Without `--model` you type the actions. `g2po view RUN --text --episode 3.2` prints a recorded episode.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...environments.episode_limits import EpisodeLimits
from ...environments.setup import text_environment_factory
from ...environments.several import player_of
from ...evaluation.agents import TextActor
from ...rollout.episode import Episode
from ...runs.run_json import read_run
from ...trajectory import Step
from ...utils.options import Options, option
from ...utils.show import printable
from ..parser import parse
from ..played import ENVIRONMENT, end_of, environment_and_tasks, play, task_at

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
        from ..model_play import play_with_model  # torch, which is slow to import

        print(play_with_model(options))
        return
    name = options.environment or ENVIRONMENT
    environment, tasks = environment_and_tasks(name, options.task, options.tasks)
    of_run = read_run(name).get("play", {}) if Path(name).is_dir() else {}
    limits = EpisodeLimits(options.max_turns or of_run.get("max_turns") or TURNS)
    environment = partial(environment, **options.environment_options) if options.environment_options else environment
    environment, row = player_of(environment, task_at(tasks, options.line))
    print(end_of(play(text_environment_factory(environment, limits), row, Typed(), limits, options)))
