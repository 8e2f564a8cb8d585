"""Play an environment in the terminal: yourself, a recorded episode again, or a trained model.

    g2po play                                # environment.py here: shows what the model would observe
    g2po play environment.py --line 3        # also a run's folder; --task '{"seed": 7}'
    g2po play --from RUN 3.2                 # the second episode of the third group, action by action
    g2po play --model RUN                    # the model plays, with its prompts

Without `--from` and `--model` you type the actions.
"""

from __future__ import annotations

import re
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
from ...environments.tasks import read_tasks, task_id_of
from ...environments.tools.trl_tools import text_environment_factory
from ...environments.validation import (
    EnvironmentContractError,
    check_task_columns,
    player_of,
    validate_observation,
    validate_step,
)
from ...rollout.episode import Episode, sent
from ...runs.iterations import iteration_numbers, load_iteration
from ...runs.run_json import read_run
from ...trajectory import Step, Trajectory, is_whole
from ...utils.errors import G2POError
from ...utils.options import Options
from ...utils.show import printable
from ...view.words import action_text
from ..parser import option, parse
from ..played import ENVIRONMENT, ended, environment_and_tasks, environment_of, task_at

HOW = "Type an action or its number; an empty line ends the episode."
HOW_RECORDED = "Enter plays the recorded action. Type another to leave the recording. Ctrl-D ends the episode."
TURNS = 50


@dataclass
class PlayOptions(Options):
    """Options of `g2po play`."""

    environment: str | None = option(
        "as for g2po check; default: environment.py, or the run's", None, positional=True, metavar="[FILE]"
    )
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[str] = option("the task, a dataset row as JSON", [], metavar="JSON")
    tasks: Path | None = option("a file of tasks; default: tasks.jsonl next to file.py", None, metavar="FILE")
    line: int = option("line of the task", 1)
    max_turns: int | None = option(
        f"maximum turns of the episode; default: the run's, else {TURNS}", None, within="[1, inf)"
    )
    replay: list[str] = option(
        "play a training episode again: a run, and group and episode", [], nargs=2, metavar=("RUN", "G.E")
    )
    iteration: int | None = option("with --from: iteration of the run; default: the last", None)
    model: str | None = option("let this model play: a run's folder", None)

    def __post_init__(self):
        super().__post_init__()
        if self.iteration is not None and not self.replay:
            raise G2POError("iteration has no effect without --from RUN GROUP.EPISODE: leave it out")
        if self.replay and (self.task or self.line != 1):
            raise G2POError("task and line have no effect with --from, whose episode has its task: leave them out")


def play(
    environment_factory: Callable[[], Any], task: dict[str, Any], turns: int, recorded: Sequence[Step] = ()
) -> tuple[float, int, str]:
    """Play an episode with actions from the terminal; return its reward, its number of steps, and its outcome.

    `recorded`: steps whose actions an empty line plays.
    """
    try:
        return _play(environment_factory, task, turns, recorded)
    except EnvironmentContractError:
        raise
    except Exception as error:
        text = f"{in_words(error)}{where_raised(error)}"
        raise EnvironmentContractError(f"the environment raised {text}") from error


def _play(
    environment_factory: Callable[[], Any], task: dict[str, Any], turns: int, recorded: Sequence[Step]
) -> tuple[float, int, str]:
    environment, episode = environment_factory(), Episode("")
    left, follows = list(recorded), bool(recorded)
    try:
        episode.open(validate_observation(environment.reset(**task), "reset"))
        if episode.task:
            print(printable(episode.task))
        print(HOW_RECORDED if follows else HOW)
        while episode.outcome is None and episode.turns < turns and (left or not follows):
            step = left.pop(0) if follows else None
            _print(episode.observation, episode.turns)
            if step is not None and episode.observation.text != step.observation:
                print("(the recorded observation was different: the environment has changed, or is random)")
            action = _read_action(episode.observation.admissible_actions or (), step)
            if action is None:
                return episode.reward, episode.turns, "stopped"
            follows = step is not None and action == sent(step)
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


def _read_action(actions: Sequence[str], recorded: Step | None = None) -> str | None:
    """Return the next line's action; `None` for an empty line, and at the end of the input.

    With a `recorded` step, its action instead; at the end of a terminal's input `None`.
    """
    if recorded is not None:
        trained = "" if recorded.advantage is None else f", advantage {recorded.advantage:+.2f}"
        print(f"recorded: {printable(action_text(recorded))}{'' if recorded.valid else ' (invalid)'}{trained}")
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None if recorded is None or sys.stdin.isatty() else sent(recorded)
    if recorded is not None and not line:
        return sent(recorded)
    chosen = actions[int(line) - 1] if line.isdecimal() and 1 <= int(line) <= len(actions) else line
    if not sys.stdin.isatty():
        print(printable(chosen))
    return chosen or None


def recorded_episode(run: str, place: str, iteration: int | None, tasks: Path | None) -> tuple[Trajectory, dict]:
    """Return an episode of a training run, GROUP.EPISODE counted from 1, and its task's row.

    Args:
        run: the run's folder.
        place: GROUP.EPISODE.
        iteration: number of the iteration. `None`: the last.
        tasks: file that has the row, if the run did not keep it whole.

    Raises:
        G2POError: if there is no such episode, or its row is incomplete.
    """
    if not re.fullmatch(r"\d+\.\d+", place):
        raise G2POError(f"episode is {place!r}: write GROUP.EPISODE, e.g. 3.2")
    numbers = iteration_numbers(run)
    if not numbers or iteration not in (None, *numbers):
        there = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "it needs save_trajectories"
        raise G2POError(
            f"{run} has no training episodes of iteration {'any' if iteration is None else iteration}: {there}"
        )
    groups = load_iteration(run, iteration or numbers[-1]).groups
    if not groups:
        raise G2POError(f"{run} has no episode of iteration {iteration or numbers[-1]} that was written to its end")
    group, episode = map(int, place.split("."))
    if not 1 <= group <= len(groups) or not 1 <= episode <= len(groups[group - 1]):
        number = len(groups[min(group, len(groups)) - 1])
        raise G2POError(f"episode is {place}: there are groups 1 to {len(groups)}, of {number} episodes")
    found = groups[group - 1][episode - 1]
    if found.row is not None and is_whole(found.row):
        return found, found.row
    rows = [row for row in read_tasks(tasks) if task_id_of(row) == found.task_id] if tasks else []
    if not rows:
        why = "is not kept" if found.row is None else "is kept without secrets and long texts"
        raise G2POError(f"the row of task {found.task_id} {why} in {run}: pass --tasks FILE, which has it")
    return found, rows[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Play."""
    options, _ = parse((PlayOptions,), argv, command="g2po play", description=__doc__)
    run = options.replay[0] if options.replay else None
    recorded, row = recorded_episode(*options.replay, options.iteration, options.tasks) if run else (None, None)
    if options.model is not None:
        from ..model_play import play_with_model  # torch, which is slow to import

        print(play_with_model(options, row))
        return
    name = options.environment or (run if run else ENVIRONMENT)
    if recorded is None:
        environment, tasks = environment_and_tasks(name, options.task, options.tasks)
        row = task_at(tasks, options.line)
    elif options.environment is None:
        environment = environment_of(read_run(run), run)
    else:
        environment, _ = environment_and_tasks(name)
    of_run = read_run(run or name).get("play", {}) if run or Path(name).is_dir() else {}
    turns = options.max_turns or of_run.get("max_turns") or TURNS
    environment = partial(environment, **options.environment_options) if options.environment_options else environment
    environment, row = player_of(environment, row)
    is_chat = recorded is not None and any(step.messages is not None for step in recorded.steps)
    factory = text_environment_factory(environment, EpisodeLimits(turns), "conversation" if is_chat else "window")
    check_task_columns(factory, row)
    reward, steps, outcome = play(factory, row, turns, recorded.steps if recorded else ())
    print(f"\n{ended(outcome, steps, reward)}")
    if recorded is not None:
        print(f"recorded: {ended(recorded.outcome, len(recorded.steps), recorded.reward)}")
