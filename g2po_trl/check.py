"""Check an environment before training: play it at random and report findings, each with a remedy.

    g2po check [environment.py] [--tasks tasks.jsonl]
    g2po check module:Environment --task '{"seed": 1}' [--episodes 8] [--turns 30]
    g2po check environment.py --show                     # the first prompt, as the model reads it

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), or the
address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.
`python -m g2po_trl.check` is the same.

`check_environment` checks the contract in this process. `examine` checks it in worker processes with time limits, as
in training, and plays random episodes to find out whether the environment can be learned: does a task start the same
in another process, are admissible actions admissible, how fast is a step, do states recur so that there is a graph,
do random actions ever succeed, do the same actions lead to the same states (as branches need them to)?
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .arguments import Parser, json_object
from .environments.checks import check_task_columns
from .environments.contract import TextEnvironment
from .environments.in_worker import FailedError, WorkerEnvironment
from .environments.pool import EnvironmentFailure, EnvironmentPool
from .environments.problems import where_raised
from .environments.tasks import read_tasks
from .environments.tools import text_environment_factory
from .objects import load
from .random_episodes import LEVELS, Finding, Played, findings_of, learnable, play_at_random
from .rollout.returning import rehearse


def examine(
    environment_factory: Callable[[], TextEnvironment],
    tasks: Sequence[dict[str, Any]],
    episodes: int = 8,
    turns: int = 30,
    seed: int = 0,
    timeout: float = 60.0,
    environment_variables: Sequence[str] = (),
) -> list[Finding]:
    """Play random episodes of each task in worker processes and return the findings, worst first.

    Args:
        environment_factory: as given to the trainer.
        tasks: dataset rows.
        episodes: of each task; as many as a group will have.
        turns: steps of an episode at most.
        timeout: seconds a reset or a step may take.
        environment_variables: see `EnvironmentPool`.
    """
    options = {"num_workers": 1, "step_timeout": timeout, "environment_variables": environment_variables}
    try:
        environment_factory = text_environment_factory(environment_factory, turns)
        findings, tasks = _columns(environment_factory, tasks)
        if tasks:
            findings += _played(environment_factory, tasks, episodes, turns, random.Random(seed), timeout, options)
    except ValueError as error:  # tools that cannot be described, variables that are not set
        findings = [Finding("error", str(error))]
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def _played(
    environment_factory: Callable,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    timeout: float,
    options: dict[str, Any],
) -> list[Finding]:
    findings: list[Finding] = []
    with EnvironmentPool(environment_factory, reset_timeout=timeout, **options) as pool:
        starts, failures = _tried(pool, tasks)
        for failure in failures:
            if failure.kind in ("timeout", "crash"):  # each further look would take as long
                return [*findings, Finding("error", f"in a worker process it {_said(failure)}")]
        with WorkerEnvironment(environment_factory, reset_timeout=10 * timeout, **options) as environment:
            findings += _contract(environment, tasks, starts, failures)
            playable = [task for task, start in zip(tasks, starts) if not isinstance(start, EnvironmentFailure)]
            if playable:
                findings += _learnable(environment, pool, playable, episodes, turns, rng, findings)
    return findings


def _columns(environment_factory: Callable, tasks: Sequence[dict[str, Any]]) -> tuple[list[Finding], list[dict]]:
    """Do the tasks fit `reset`? And those that do."""
    findings, fitting = [], []
    for number, task in enumerate(tasks, 1):
        try:
            check_task_columns(environment_factory, task)
            fitting.append(task)
        except ValueError as error:
            findings.append(Finding("error", f"task {number}: {error}" if len(tasks) > 1 else str(error)))
    return findings, fitting


def _learnable(
    environment: WorkerEnvironment,
    pool: EnvironmentPool,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    so_far: Sequence[Finding],
) -> list[Finding]:
    """Can a model learn here? As far as episodes can be played at all."""
    findings = []
    with suppress(FailedError):  # random episodes meet it, and say so
        findings += _admissible(environment, tasks[0])
    played = play_at_random(environment, tasks, episodes, turns, rng)
    findings += _failed(played.failures)
    if not played.step_seconds:
        return findings
    findings += findings_of(played)
    if any(finding.level == "error" for finding in [*so_far, *findings]):
        return findings  # what follows would only say the same in other words
    findings += _returned_to(pool, tasks, played)
    if played.lists_actions:
        findings += learnable(played, episodes, turns)
    return findings


def _tried(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> tuple[list, list[EnvironmentFailure]]:
    """What each task starts with; and what fails when a valid and an invalid action are played."""
    starts = pool.reset([*tasks, *tasks])
    live = [slot for slot, answer in enumerate(starts) if not isinstance(answer, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in live}
    actions |= {slot: "no such action" for slot in live if slot >= len(tasks)}
    answers = [*starts, *pool.step(actions).values()]
    return starts, [answer for answer in answers if isinstance(answer, EnvironmentFailure)]


def _contract(
    environment: WorkerEnvironment,
    tasks: Sequence[dict[str, Any]],
    starts: Sequence[Any],
    failures: list[EnvironmentFailure],
) -> list[Finding]:
    """Does it keep its contract, and does a task start in one process as it did in another?"""
    findings: dict[str, Finding] = {}
    for task, there in zip(tasks, starts):
        try:
            here = environment.reset(**task)
        except FailedError as failed:
            shown = f" (task {task})" if len(tasks) > 1 else ""
            for text in _said(failed.failure).splitlines():
                findings.setdefault(text, Finding("error", f"{text}{shown}"))
            if failed.failure.kind in ("timeout", "crash"):
                break
            continue
        if not isinstance(there, EnvironmentFailure) and here != there:
            text = (
                f"a task starts differently in another process: {here.text[:80]!r} and {there.text[:80]!r}. "
                "Seed all randomness from the task; hash() of a string and the order of a set differ by process."
            )
            findings.setdefault("starts differently", Finding("error", text))
    if not findings:  # only sometimes, then
        findings = {text: Finding("error", f"in a worker process it {text}") for text in map(_said, failures)}
    return list(findings.values()) or [
        Finding("ok", "keeps the contract of reset, step and close, also for actions that are not admissible."),
        Finding("ok", "can be sent to worker processes, and tasks start the same in each."),
    ]


def _failed(failures: Sequence[EnvironmentFailure]) -> list[Finding]:
    """Each way in which random episodes failed, once."""
    remedies = {"exception": ". Return an observation instead of raising."}
    texts = (f"a random episode {_said(failure)}{remedies.get(failure.kind, '')}" for failure in failures)
    return [Finding("error", text) for text in dict.fromkeys(texts)]


def _said(failure: EnvironmentFailure) -> str:
    """What an environment did, in a line."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}{where_raised(message)}"
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + message


def _admissible(environment: WorkerEnvironment, task: dict[str, Any]) -> list[Finding]:
    """Play every action that the first observation lists, and an invalid one."""
    first = environment.reset(**task)
    if not first.admissible_actions:
        return []

    def answer(action: str) -> tuple[str, float, bool]:
        environment.reset(**task)
        result = environment.step(action)
        return result.observation.text, result.reward, result.terminated

    nonsense = answer("xyzzy plugh")
    refused = [action for action in first.admissible_actions if answer(action) == nonsense]
    if not refused:
        return [Finding("ok", "admissible actions get other responses than an invalid action.")]
    shown = ", ".join(map(repr, refused[:3])) + (" …" if len(refused) > 3 else "")
    return [
        Finding(
            "warning",
            f"{len(refused)} of {len(first.admissible_actions)} admissible actions get the same response as an "
            f"invalid action ({nonsense[0][:60]!r}): {shown}. List only executable actions, or describe their effect.",
        )
    ]


def _returned_to(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> list[Finding]:
    """Do the actions of each task's longest episode lead to the same states again, in another process?"""
    for task, group in zip(tasks, played.groups):
        steps = max((trajectory.steps for trajectory in group), key=len)
        if different := rehearse(pool, task, steps):
            return [
                Finding(
                    "warning",
                    f"the same actions do not lead to the same states again: {different}. Branches (branch_share) and "
                    "episodes whose worker is lost need it: seed all randomness from the task, and leave clocks and "
                    "random names out of observations.",
                )
            ]
    return [
        Finding(
            "ok",
            "states can be returned to by playing their actions again, also in another process (branch_share).",
        )
    ]


def _task(text: str) -> dict[str, Any]:
    try:
        task = json.loads(text)
    except ValueError as error:
        raise ValueError(f"task {text} is not valid JSON ({error}): write it as '{{\"seed\": 1}}'") from error
    if not isinstance(task, dict):
        raise ValueError(f"task is {text}: write an object, as '{{\"seed\": 1}}'")
    return task


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="g2po check", description=__doc__.partition("\n\n`check_env")[0])
    parser.add_argument(
        "environment",
        nargs="?",
        default="environment.py",
        help="file.py, file.py:Class, module:Class, or an OpenEnv server's address; default: %(default)s",
    )
    given = "arguments of the environment, as a JSON object"
    parser.add_argument("--environment-options", metavar="JSON", type=json_object, default={}, help=given)
    given = "a dataset row as JSON; may be repeated"
    parser.add_argument("--task", metavar="JSON", action="append", default=[], help=given)
    parser.add_argument(
        "--tasks",
        metavar="FILE",
        type=Path,
        help="a file with one row per line; the first 5 are played. Default: tasks.jsonl next to file.py",
    )
    parser.add_argument("--episodes", metavar="N", type=int, default=8, help="episodes of each task; default: 8")
    parser.add_argument("--turns", metavar="N", type=int, default=30, help="maximum turns of an episode; default: 30")
    given = "maximum seconds of a reset or a step; default: 60"
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0, help=given)
    given = "pass these variables (HF_TOKEN, …) to the environment although they look like secrets"
    parser.add_argument("--environment-variables", metavar="NAME", nargs="*", default=[], help=given)
    shown = "print the prompt of the first task's first step, as the model reads it; nothing else is played"
    parser.add_argument("--show", action="store_true", help=shown)
    template = "with --show: module:TEMPLATE, a PromptTemplate; default: the environment's"
    parser.add_argument("--prompt", metavar="NAME", help=template)
    model = "with --show: also this model's chat template and number of tokens"
    parser.add_argument("--model", metavar="FOLDER|ID", help=model)
    args = parser.parse_args(argv)
    for name in ("episodes", "turns", "timeout"):
        if not getattr(args, name) > 0:
            parser.error(f"{name} is {getattr(args, name):g}: set it above 0")
    if not args.show and (args.model or args.prompt):
        parser.error("--model and --prompt have no effect without --show: add it, or leave them out")
    try:
        environment, tasks = environment_and_tasks(args.environment, args.task, args.tasks)
        tasks = tasks[: max(5, len(args.task))]
        if args.environment_options:
            environment = partial(environment, **args.environment_options)
        if args.show:
            print(first_prompt(environment, tasks[0], args.prompt, args.model, args.turns))
            return
    except ValueError as error:
        raise SystemExit(str(error)) from error
    findings = examine(
        environment,
        tasks,
        args.episodes,
        args.turns,
        timeout=args.timeout,
        environment_variables=args.environment_variables,
    )
    print(*findings, sep="\n")
    sys.exit(any(finding.level == "error" for finding in findings))


def environment_and_tasks(
    name: str, given: Sequence[str] = (), file: Path | None = None
) -> tuple[Callable, list[dict[str, Any]]]:
    """Load an environment by its name, and its tasks: those given as JSON and those of a file, by default tasks.jsonl
    next to file.py, or one without arguments.

    Raises:
        ValueError, SystemExit: when one of them is not there.
    """
    if name == "environment.py" and not Path(name).is_file():
        raise ValueError("there is no environment.py here: name an environment, as file.py or module:Class")
    path = Path(name.rpartition(":")[0] if ":" in name else name)
    beside = path.with_name("tasks.jsonl")
    if not given and file is None and path.suffix == ".py" and beside.is_file():
        file = beside
    tasks = [_task(text) for text in given] + (read_tasks(file) if file else [])
    return load(name), tasks or [{}]


def first_prompt(
    environment_factory: Callable, task: dict[str, Any], prompt: str | None, model: str | None, turns: int
) -> str:
    """The chat messages of a task's first step; with a model, as its chat template writes them, and their tokens.

    Raises:
        ValueError: when the environment fails, or there is no such template.
    """
    from .rollout.prompting import PromptTemplate
    from .rollout.tool_prompt import prompt_of

    template = load(prompt) if prompt else prompt_of(environment_factory)
    if not isinstance(template, PromptTemplate):
        raise ValueError(f"prompt is {prompt!r}, which is no PromptTemplate: name one")
    environment_factory = text_environment_factory(environment_factory, turns)
    check_task_columns(environment_factory, task)
    with EnvironmentPool(environment_factory, num_workers=1) as pool:
        (first,) = pool.reset([task])
    if isinstance(first, EnvironmentFailure):
        raise ValueError(f"the environment {_said(first)}")
    messages = template.messages(first.text, first.task or "", first.admissible_actions)
    if model is None:
        texts = [f"--- {message['role']} ---\n{message['content']}" for message in messages]
        return "\n".join([*texts, f"--- {sum(len(m['content']) for m in messages)} characters ---"])
    from transformers import AutoTokenizer  # slow to import, and only this needs it

    from .rollout.chat_template import template_of

    tokenizer = AutoTokenizer.from_pretrained(model)
    if template_of(tokenizer) is None:
        raise ValueError(f"model is {model!r}, whose tokenizer has no chat template")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    number = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return f"{text}\n--- {number} tokens ---"


if __name__ == "__main__":
    main()
