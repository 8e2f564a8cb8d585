"""Check an environment or an agent before training: play it at random and report findings, each with a remedy.

    g2po check                                           # environment.py here, or agent.py; their tasks.jsonl
    g2po check module:Environment --task '{"seed": 1}' --episodes 8 --max-turns 30
    g2po check --agent agent.py                          # an agent, with random answers
    g2po check --model FOLDER                            # a few episodes with a model, also --base-url
    g2po check environment.py --show [--model FOLDER]    # the first prompt; with a model, exactly what it reads
    g2po check runs/my-run                               # what a run plays

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), a
dictionary of several, or the address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...check.examine import Examination
from ...check.findings import Finding, Kind, has_errors, learns_nothing, worst_first
from ...check.play import TEXTS
from ...engines.sampling import Sampling
from ...environments.episode_limits import EpisodeLimits
from ...environments.loading import (
    beside,
    file_of,
    import_file,
    load,
    load_template,
    resolve_agent_name,
    resolve_environment_name,
)
from ...environments.pool.limits import PoolLimits
from ...environments.setup import agent_factory
from ...environments.several import COLUMN, environments_of
from ...runs.run_json import load_prompt, read_run
from ...utils.errors import G2POError
from ...utils.options import require
from ...utils.show import printable, wrapped
from ..first_prompt import FirstPrompt
from ..parser import option, parse, read_config
from ..played import ENVIRONMENT, environment_and_tasks, tasks_of

if TYPE_CHECKING:
    from ...evaluation.chat_models import ChatModel

TURNS, EXPERT_EPISODES = 30, 4  # of each task: an expert may be random


@dataclass
class CheckOptions(PoolLimits, EpisodeLimits):
    """Options of `g2po check`."""

    environment: str | None = option(
        "file.py[:Class], module:Class, a server, or a run's folder; default: environment.py, else agent.py",
        None,
        positional=True,
        metavar="[FILE]",
    )
    agent: str | None = option("function (task, client) or AgentCommand", None, metavar="FILE[:NAME]")
    agent_state_key: str | None = option("file.py:FUNCTION: messages -> state key", None, metavar="NAME")
    response: list[str] = option("with --agent: a text that the random model may answer; may be repeated", [])
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[str] = option("a dataset row as JSON; may be repeated", [], metavar="JSON")
    tasks: Path | None = option("default: tasks.jsonl; 5 rows are played, 2 with a model", None, metavar="FILE")
    episodes: int | None = option("episodes of each task; default: 8, 4 with a model", None, within="[1, inf)")
    max_turns: int | None = option("default: max_turns of config.yaml, else 30", None, within="[1, inf)")
    show: bool = option("print the first prompt of the first task", False)
    prompt: str | None = option("with --show or --model: module:TEMPLATE", None, metavar="NAME")
    model: str | None = option("play a few episodes with this model; with --show: use its chat template", None)
    base_url: str | None = option("with --model: URL of a server, up to /v1", None, metavar="URL")

    def __post_init__(self):
        super().__post_init__()
        if self.agent is None and self.environment is None and not Path("environment.py").is_file():
            self.agent = "agent.py" if Path("agent.py").is_file() else None
        if self.agent is not None and self.environment is not None:
            message = f"{self.environment} and --agent {self.agent} are both given: remove one of them"
            raise G2POError(message, "agent", self.agent)
        is_agent, at_random = self.agent is not None, not (self.show or self.model)
        conditions = {
            "agent_state_key": (is_agent, "without --agent"),
            "response": (is_agent and at_random, "without --agent, and with --model, which answers instead"),
            "environment_options": (not is_agent, "with --agent"),
            "prompt": (not (is_agent or at_random), "without --show or --model, and with --agent"),
            "base_url": (self.plays_with_model, "without the name of a model to play with (--model), and with --show"),
            "max_episode_tokens": (self.plays_with_model, "without --model: random responses have no tokens"),
        }
        for name, (is_used, when) in conditions.items():
            value = getattr(self, name)
            require(is_used or not value, name, value, f"it has no effect {when}; leave it out")

    @property
    def name(self) -> str:
        """Name of the environment or the agent."""
        return self.agent or self.environment or "environment.py"

    @property
    def plays_with_model(self) -> bool:
        return self.model is not None and not self.show


def main(argv: Sequence[str] | None = None) -> None:
    """Check. Exit code 1 if there is an error."""
    options, _ = parse((CheckOptions,), argv, command="g2po check", description=__doc__)
    name = options.name if options.agent is None else resolve_agent_name(options.agent)
    run = read_run(name) if options.agent is None and Path(name).is_dir() else {}
    config = run.get("play") or read_config(beside(name, "config.yaml"))
    given = {field.name: getattr(options, field.name) for field in fields(EpisodeLimits)}
    given = {name: config.get(name) if value is None else value for name, value in given.items()}
    limits = EpisodeLimits(**given | {"max_turns": given["max_turns"] or TURNS})
    if options.agent is None:
        environment, tasks = environment_and_tasks(name, options.task, options.tasks)
        if options.environment_options:
            environment = partial(environment, **options.environment_options)
    else:
        key = load(options.agent_state_key) if options.agent_state_key else None
        environment = agent_factory(name, limits.max_turns, key)
        tasks = tasks_of(name, options.task, options.tasks)
    tasks = _first_of_each(environment, tasks, max(2 if options.plays_with_model else 5, len(options.task)))
    template = None
    if options.model:
        from ...config import G2POConfig  # with torch, which is slow to import

        config = {field.name: field.default for field in fields(G2POConfig)} | dict(config)
    if options.show or options.plays_with_model:
        wording = options.prompt or config.get("prompt")
        template = load_template(wording) if wording else load_prompt(run["prompt"]) if run.get("prompt") else None
    if options.show:
        shown = FirstPrompt.of(environment, tasks[0], limits.max_turns, template, config)
        print(printable(shown.text(options.model)))
        return
    model = options.model or config.get("model_name_or_path")
    near = file_of(name).parent / str(model)  # relative paths of config.yaml start there
    examination = Examination(
        environment,
        tasks,
        options.episodes or (4 if options.plays_with_model else 8),
        limits.max_turns,
        PoolLimits.of(options),
        limits,
        (run.get("trainer") or config).get("state_key_ignores"),
        options.response or TEXTS,
        None if options.base_url else near if model and near.is_dir() else model,
    )
    if options.plays_with_model:
        setting = SimpleNamespace(**config)
        with closing(_chat_model(options, setting.chat_template_kwargs)) as chat:
            findings = examination.with_model(chat, Sampling.of(setting), setting, template)
    else:
        findings = examination.at_random()
        if not has_errors(findings) and _has_expert(file_of(options.name)):
            findings = _with_expert(findings, options, examination)
    print(*(wrapped(printable(str(finding)), indent=10) for finding in findings), sep="\n")
    if has_errors(findings):
        sys.exit(1)
    print(f"Next: {_next_command(options, config.get('model_name_or_path'), findings)}")


def _with_expert(findings: list[Finding], options: CheckOptions, examination: Examination) -> list[Finding]:
    """Return the findings with those of the expert of the file, which refute or repeat some of them."""
    from ...teach.experts import expert_play, find_expert

    name = resolve_agent_name(options.agent) if options.agent else resolve_environment_name(options.name)
    try:
        expert = find_expert(name)
        if expert is None or environments_of(examination.environment_factory):
            return findings
        tasks = [task for task in examination.tasks for _ in range(EXPERT_EPISODES)]
        factory, rows, answer = expert_play(examination.environment_factory, expert, tasks, examination.episode_limits)
        of_expert = replace(examination, environment_factory=factory, tasks=rows, episodes=1).with_expert(answer)
    except G2POError as error:
        return worst_first([*findings, Kind.REFUSED.found(what="the expert: ", error=str(error))])
    kinds = {finding.kind for finding in of_expert}
    repeated = kinds & {Kind.SPELLED_WORDS} | ({Kind.NO_REWARD} if Kind.EXPERT_FAILS not in kinds else set())
    return worst_first([*(finding for finding in findings if finding.kind not in repeated), *of_expert])


def _first_of_each(environment: Callable, tasks: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the first `number` tasks, or that many of each environment if there are several."""
    counts: Counter[Any] = Counter()
    chosen = []
    for task in tasks:
        name = str(task.get(COLUMN)) if environments_of(environment) else None
        counts[name] += 1
        chosen += [task] if counts[name] <= number else []
    return chosen


def _next_command(options: CheckOptions, of_config: str | None, findings: Sequence[Finding]) -> str:
    """Return the next command, or what has to change first if training would learn nothing.

    `of_config`: the model of config.yaml.
    """
    name, path = options.name, file_of(options.name)
    if Path(name).is_dir():
        return shlex.join(["g2po", "evaluate", "--model", name])
    if options.environment_options:
        return (
            f"write game = functools.partial({name.rpartition(':')[2]}, **{options.environment_options}) into game.py "
            "and tasks into tasks.jsonl next to it; then g2po train game.py:game --model MODEL"
        )
    if not options.agent and name.endswith(".py") and name != ENVIRONMENT:  # `g2po train FILE.py` is a script
        name = f"{name}:{resolve_environment_name(name).rpartition(':')[2]}"
    words = ["--agent", name] if options.agent else [] if name == ENVIRONMENT else [name]
    words += ["--tasks", str(options.tasks)] if options.tasks else []
    trained = ["--model", options.model] if options.model and not options.base_url else []
    kinds, nothing = {finding.kind for finding in findings}, learns_nothing(findings)
    again = shlex.join(["g2po", "check", *words])
    if nothing and Kind.ALL_WON in kinds:
        return f"harder tasks, then {again} again"
    if Kind.EXPERT_FAILS in kinds:
        return f"an expert in {path.name} that succeeds, then {again} again"
    if _has_expert(path) and (nothing or not options.model):
        return shlex.join(["g2po", "teach", *words, *trained])
    if nothing and options.model:
        return (
            f"a model that sometimes succeeds: write an expert into {path.name} for g2po teach, or try a larger model"
        )
    if nothing:
        return f"{again} --model {shlex.quote(of_config or 'MODEL')} shows whether the model ever succeeds"
    words += ["--agent-state-key", options.agent_state_key] if options.agent_state_key else []
    return shlex.join(["g2po", "train", *words, *(trained or ([] if of_config else ["--model", "MODEL"]))])


def _has_expert(path: Path) -> bool:
    return path.suffix == ".py" and hasattr(import_file(path), "expert")


def _chat_model(options: CheckOptions, kwargs: dict[str, Any] | None) -> ChatModel:
    """Return the model that plays. `kwargs`: variables of its chat template."""
    from ...evaluation.chat_models import load_local
    from ...evaluation.server_chat import ServerChat

    try:
        if options.base_url:
            return ServerChat(options.base_url, options.model, chat_template_kwargs=kwargs)
        return load_local(options.model, chat_template_kwargs=kwargs)
    except (OSError, ValueError) as error:
        message = f"model is {options.model!r}, which cannot be loaded: {error}"
        raise G2POError(message, "model", options.model) from error
