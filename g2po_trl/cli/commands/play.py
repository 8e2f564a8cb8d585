"""`g2po play`: play an environment in the terminal, in place of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...environments.adapters.trl_tools import text_environment_factory
from ...environments.causes import in_words
from ...environments.contract import Observation
from ...environments.contract_violations import where_raised
from ...environments.validation import (
    EnvironmentContractError,
    check_task_columns,
    validate_observation,
    validate_step,
)
from ...rollout.episode import Episode
from ...utils.parser import Parser, json_object

HOW = "Type an action or its number; an empty line ends the episode."


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
            print(episode.task)
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
        print(f"\n{episode.observation.text}")
        return episode.reward, episode.turns, episode.outcome or "truncated"
    finally:
        environment.close()


def _print(observation: Observation, steps: int) -> None:
    print(f"\n[{steps + 1}] {observation.text}")
    for number, action in enumerate(observation.admissible_actions or (), 1):
        print(f"  {number:2} {action}")


def _read_action(actions: Sequence[str]) -> str | None:
    """Return the next line's action; `None` for an empty line, and at the end of the input."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    chosen = actions[int(line) - 1] if line.isdecimal() and 1 <= int(line) <= len(actions) else line
    if not sys.stdin.isatty():
        print(chosen)
    return chosen or None


def main(argv: Sequence[str] | None = None) -> None:
    from .check import environment_and_tasks

    parser = Parser(
        prog="g2po play",
        description="Play an environment yourself in the terminal: with the observations of a model, without its "
        "prompt.\n\n    g2po play\n    g2po play environment.py --line 3",
    )
    add = parser.add_argument
    add("environment", nargs="?", default="environment.py", help="as for g2po check; default: %(default)s")
    add("--environment-options", metavar="JSON", type=json_object, default={}, help="arguments of the environment")
    add("--task", metavar="JSON", action="append", default=[], help="the task, a dataset row as JSON")
    add("--tasks", metavar="FILE", type=Path, help="a file of tasks; default: tasks.jsonl next to file.py")
    add("--line", metavar="N", type=int, default=1, help="line of the task; default: 1")
    add("--turns", metavar="N", type=int, default=50, help="maximum turns of the episode; default: 50")
    args = parser.parse_args(argv)
    try:
        environment, tasks = environment_and_tasks(args.environment, args.task, args.tasks)
        if not 1 <= args.line <= len(tasks):
            raise ValueError(f"line is {args.line}, and there are {len(tasks)} tasks: choose one of them")
        if args.turns < 1:
            raise ValueError(f"turns is {args.turns}: set it to at least 1")
        factory = partial(environment, **args.environment_options) if args.environment_options else environment
        factory = text_environment_factory(factory, args.turns)
        check_task_columns(factory, tasks[args.line - 1])
        reward, steps, outcome = play(factory, tasks[args.line - 1], args.turns)
    except (EnvironmentContractError, ValueError) as error:
        raise SystemExit(str(error)) from error
    print(f"\n{outcome} after {steps} step{'s' * (steps != 1)}, reward {reward:g}")
