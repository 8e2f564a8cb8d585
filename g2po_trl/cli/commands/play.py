"""Play an environment in the terminal: yourself, or a trained model.

    g2po play                                # environment.py here: shows what the model would observe
    g2po play environment.py --line 3        # also a run's folder; --task '{"seed": 7}'
    g2po play --model RUN                    # the model plays, with its prompts

Without `--model` you type the actions. `g2po view RUN --text --episode 3.2` prints a recorded episode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...environments.causes import in_words
from ...environments.contract import Observation
from ...environments.episode_limits import EpisodeLimits
from ...environments.failures import where_raised
from ...environments.setup import text_environment_factory
from ...environments.several import player_of
from ...environments.tasks import check_task_columns
from ...environments.validation import EnvironmentContractError, validate_observation, validate_step
from ...rollout.episode import Episode
from ...runs.run_json import read_run
from ...utils.options import Options
from ...utils.show import printable
from ..parser import option, parse
from ..played import ENVIRONMENT, ended, environment_and_tasks, task_at

HOW = "Type an action or its number; an empty line ends the episode."
TURNS = 50


@dataclass
class PlayOptions(Options):
    """Options of `g2po play`."""

    environment: str | None = option("as for g2po check, or a run's folder", None, positional=True, metavar="[FILE]")
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[str] = option("the task, a dataset row as JSON", [], metavar="JSON")
    tasks: Path | None = option("a file of tasks; default: tasks.jsonl next to file.py", None, metavar="FILE")
    line: int = option("line of the task", 1)
    max_turns: int | None = option(
        f"maximum turns of the episode; default: the run's, else {TURNS}", None, within="[1, inf)"
    )
    model: str | None = option("let this model play: a run's folder", None)


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
        print(f"{printable(episode.task)}\n{HOW}" if episode.task else HOW)
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
    for image in observation.images:
        print(f"  an image of {image.size[0]} x {image.size[1]} pixels")
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
    options, _ = parse((PlayOptions,), argv, command="g2po play", description=__doc__)
    if options.model is not None:
        from ..model_play import play_with_model  # torch, which is slow to import

        print(play_with_model(options))
        return
    name = options.environment or ENVIRONMENT
    environment, tasks = environment_and_tasks(name, options.task, options.tasks)
    of_run = read_run(name).get("play", {}) if Path(name).is_dir() else {}
    turns = options.max_turns or of_run.get("max_turns") or TURNS
    environment = partial(environment, **options.environment_options) if options.environment_options else environment
    environment, row = player_of(environment, task_at(tasks, options.line))
    factory = text_environment_factory(environment, EpisodeLimits(turns), "window")
    check_task_columns(factory, row)
    reward, steps, outcome = play(factory, row, turns)
    print(f"\n{ended(outcome, steps, reward)}")
