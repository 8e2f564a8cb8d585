"""Play an environment in the terminal.

    g2po play                                # environment.py here: shows what the model would observe
    g2po play environment.py --line 3        # or --task '{"seed": 7}'

You type the actions. `g2po view RUN --text --episode 3.2` prints a recorded episode.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...check.play import AnswerActor, failure_of
from ...environments.causes import describe_failure
from ...environments.episode_limits import EpisodeLimits
from ...environments.loading import load
from ...environments.pool.limits import PoolLimits
from ...environments.pool.pool import EnvironmentPool
from ...environments.setup import played_as
from ...environments.several import mixed, player_of
from ...environments.tasks import check_task_columns
from ...rollout.episode import Episode
from ...rollout.player import Player
from ...utils.errors import G2POError
from ...utils.options import Options, option, require
from ...utils.show import printable
from ..parser import parse
from ..recipe_files import ENVIRONMENT, tasks_of

HOW = "Type an action or its number; an empty line ends the episode."


@dataclass
class PlayOptions(Options):
    """Options of `g2po play`."""

    environment: str | None = option("as for g2po check", None, positional=True, metavar="[FILE]")
    task: list[dict[str, Any]] = option("the task, a dataset row as JSON", [], metavar="JSON")
    tasks: Path | None = option("a file of tasks; default: tasks.jsonl next to file.py", None, metavar="FILE")
    line: int = option("line of the task", 1)
    max_turns: int = option("turns of the episode", 50, within="[1, inf)")
    environment_variables: list[str] = option("variables that the environment gets, secrets included", [])


def typed(episode: Episode) -> str | None:
    """Show an observation and return the action that the user types; `None` ends the episode."""
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
    return chosen or None


def main(argv: Sequence[str] | None = None) -> None:
    """Play."""
    options, _ = parse((PlayOptions,), argv, command="g2po play", description=__doc__)
    name, limits = options.environment or ENVIRONMENT, EpisodeLimits(options.max_turns)
    made, tasks = mixed(load(name)), tasks_of(name, options.task, options.tasks)
    exists = 1 <= options.line <= len(tasks)
    require(exists, "line", options.line, f"there are {len(tasks)} tasks; choose one of them")
    made, task = player_of(made, tasks[options.line - 1])
    factory, *_ = played_as(made, limits, history="window")
    check_task_columns(factory, task)
    with EnvironmentPool(factory, PoolLimits.of(options, num_environment_workers=1)) as pool:
        ((played,), _) = Player(pool, AnswerActor(typed), limits).play([task])
    if not played.counted:
        raise G2POError(f"the environment {describe_failure(failure_of(played))}", "environment")
    number, why = len(played.steps), f": {played.failure_reason}" if played.failure_reason else ""
    end = f"{played.outcome} after {number} step{'s' * (number != 1)}, reward {played.reward:g}{why}"
    print(printable(f"\n{played.final_observation or ''}\n\n{end}"))
