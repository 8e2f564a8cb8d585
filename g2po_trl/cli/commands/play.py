"""Play an environment yourself in the terminal: with the observations of a model, without its prompt.

g2po play
g2po play environment.py --line 3
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...environments.adapters.trl_tools import text_environment_factory
from ...environments.causes import in_words
from ...environments.contract import Observation
from ...environments.episode_limits import EpisodeLimits
from ...environments.validation import (
    EnvironmentContractError,
    check_task_columns,
    validate_observation,
    validate_step,
)
from ...evaluation.contract import where_raised
from ...rollout.episode import Episode
from ...utils.errors import G2POError
from ...utils.show import printable
from ..parser import option, parse

HOW = "Type an action or its number; an empty line ends the episode."


@dataclass
class PlayOptions:
    """Options of `g2po play`."""

    environment: str = option("as for g2po check", "environment.py", positional=True, metavar="FILE")
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[str] = option("the task, a dataset row as JSON", [], metavar="JSON")
    tasks: Path | None = option("a file of tasks; default: tasks.jsonl next to file.py", None, metavar="FILE")
    line: int = option("line of the task", 1)
    max_turns: int = option("maximum turns of the episode", 50)


def play(environment_factory: Callable[[], Any], task: dict[str, Any], turns: int) -> tuple[float, int, str]:
    """Play an episode with actions from the terminal; return its reward, its number of steps, and its outcome."""
    try:
        return _play(environment_factory, task, turns)
    except EnvironmentContractError:
        raise
    except Exception as error:
        text = f"{in_words(error)}{where_raised(error)}"
        raise EnvironmentContractError(f"the environment raised {text}") from error


def _play(environment_factory: Callable[[], Any], task: dict[str, Any], turns: int) -> tuple[float, int, str]:
    environment, episode = environment_factory(), Episode("")
    try:
        episode.open(validate_observation(environment.reset(**task), "reset"))
        if episode.task:
            print(printable(episode.task))
        print(HOW)
        while episode.outcome is None and episode.turns < turns:
            _print(episode.observation, episode.turns)
            action = _read_action(episode.observation.admissible_actions or ())
            if action is None:
                return episode.reward, episode.turns, "stopped"
            episode.steps.append(episode.step(action, None))
            episode.advance(validate_step(environment.step(action), "step"))
            if reward := episode.steps[-1].reward:
                print(f"reward {reward:g}")
        print(f"\n{printable(episode.observation.text)}")
        return episode.reward, episode.turns, episode.outcome or "truncated"
    finally:
        environment.close()


def _print(observation: Observation, steps: int) -> None:
    print(f"\n[{steps + 1}] {printable(observation.text)}")
    for number, action in enumerate(observation.admissible_actions or (), 1):
        print(f"  {number:2} {printable(action)}")


def _read_action(actions: Sequence[str]) -> str | None:
    """Return the next line's action; `None` for an empty line, and at the end of the input."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    chosen = actions[int(line) - 1] if line.isdecimal() and 1 <= int(line) <= len(actions) else line
    if not sys.stdin.isatty():
        print(printable(chosen))
    return chosen or None


def main(argv: Sequence[str] | None = None) -> None:
    """Play."""
    from .check import environment_and_tasks

    options, _ = parse((PlayOptions,), argv, command="g2po play", description=__doc__)
    environment, tasks = environment_and_tasks(options.environment, options.task, options.tasks)
    if not 1 <= options.line <= len(tasks):
        raise G2POError(f"line is {options.line}, and there are {len(tasks)} tasks: choose one of them")
    if options.max_turns < 1:
        raise G2POError(f"max_turns is {options.max_turns}: set it to at least 1")
    factory = partial(environment, **options.environment_options) if options.environment_options else environment
    factory, task = text_environment_factory(factory, EpisodeLimits(options.max_turns)), tasks[options.line - 1]
    check_task_columns(factory, task)
    reward, steps, outcome = play(factory, task, options.max_turns)
    print(f"\n{outcome} after {steps} step{'s' * (steps != 1)}, reward {reward:g}")
