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
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...check.examine import Examination
from ...check.findings import Finding, Kind, has_errors, learns_nothing, worst_first
from ...check.play import TEXTS
from ...engines.sampling import Sampling
from ...environments.episode_limits import EpisodeLimits
from ...environments.loading import file_of, load, load_template, resolve_agent_name, resolve_environment_name
from ...environments.pool.limits import PoolLimits
from ...environments.setup import agent_factory
from ...environments.several import COLUMN, environments_of
from ...prompts.template import PromptTemplate
from ...runs.run_json import load_prompt, read_run
from ...utils.errors import G2POError
from ...utils.options import option, require
from ...utils.show import printable, wrapped
from ..first_prompt import FirstPrompt
from ..parser import parse
from ..played import ENVIRONMENT, environment_and_tasks, environment_or_agent, tasks_of
from ..preflight import check_model
from ..recipe_files import keys_beside

TURNS, EXPERT_EPISODES = 30, 4  # of each task: an expert may be random


@dataclass
class CheckOptions(PoolLimits, EpisodeLimits):
    """Options of `g2po check`."""

    environment: str | None = option(
        "or module:Class, a server, a run", None, positional=True, metavar="[FILE[:Class]]"
    )
    agent: str | None = option("function (task, client) or AgentCommand", None, metavar="FILE[:NAME]")
    agent_state_key: str | None = option("FILE:FUNCTION: messages -> key", None, metavar="NAME", needs="agent")
    response: list[str] = option("a text that the random model may answer; may be repeated", [], needs="agent")
    environment_options: dict[str, Any] = option("arguments of the environment", {}, needs="agent=None")
    task: list[dict[str, Any]] = option("a dataset row as JSON; may be repeated", [], metavar="JSON")
    tasks: Path | None = option("default: tasks.jsonl; 5 rows are played, 2 with a model", None, metavar="FILE")
    episodes: int | None = option("episodes of each task; default: 8, 4 with a model", None, within="[1, inf)")
    max_turns: int | None = option(f"default: max_turns of config.yaml, else {TURNS}", None, within="[1, inf)")
    show: bool = option("print the first prompt of the first task", False)
    prompt: str | None = option("module:TEMPLATE", None, metavar="NAME", needs="show|model")
    model: str | None = option("play a few episodes with this model; with --show: use its chat template", None)
    base_url: str | None = option("with --model: URL of a server, up to /v1", None, metavar="URL", needs="model")

    def __post_init__(self):
        super().__post_init__()
        is_played = self.model is not None and not self.show
        where = "with --model" if is_played else "without a model that plays"
        useless = {"response" if is_played else "max_episode_tokens": where}
        useless |= {"base_url": "with --show"} if self.show else {}
        for name, where in useless.items():
            value = getattr(self, name)
            require(not value, name, value, f"it has no effect {where}; leave it out")
        environment, self.agent = environment_or_agent(self.environment, self.agent)
        self.name = self.agent or environment or ENVIRONMENT


def main(argv: Sequence[str] | None = None) -> None:
    """Check. Exit code 1 if there is an error."""
    options, _ = parse((CheckOptions,), argv, command="g2po check", description=__doc__)
    name = (resolve_agent_name if options.agent else resolve_environment_name)(options.name)
    run = read_run(name) if Path(name).is_dir() else {}
    config = run.get("play") or keys_beside({"environment": name})
    given = {one.name: getattr(options, one.name) for one in fields(EpisodeLimits)}
    given = {field: value for field, value in given.items() if value is not None}
    limits = EpisodeLimits.of(SimpleNamespace(**{"max_turns": TURNS, **config}), **given)
    if options.agent:
        key = load(options.agent_state_key) if options.agent_state_key else None
        environment, tasks = agent_factory(name, limits.max_turns, key), tasks_of(name, options.task, options.tasks)
    else:
        environment, tasks = environment_and_tasks(name, options.task, options.tasks)
        if options.environment_options:
            environment = partial(environment, **options.environment_options)
    plays = options.model is not None and not options.show
    tasks = _first_of_each(tasks, max(2 if plays else 5, len(options.task)))
    wording, own_model = options.prompt or config.get("prompt"), config.get("model_name_or_path")
    template = load_template(wording) if wording else load_prompt(run["prompt"]) if run.get("prompt") else None
    if options.model:
        from ...config import G2POConfig  # with torch, which is slow to import

        config = {field.name: field.default for field in fields(G2POConfig)} | dict(config)
    if options.show:
        if options.model:
            check_model("model", options.model)
        print(printable(FirstPrompt(environment, tasks[0], limits.max_turns, template, config).text(options.model)))
        return
    number, texts = options.episodes or (4 if plays else 8), options.response or TEXTS
    ignores = (run.get("trainer") or config).get("state_key_ignores")
    known_by = None if options.base_url else options.model or own_model
    examination = Examination(environment, tasks, number, limits, PoolLimits.of(options), ignores, texts, known_by)
    settings = SimpleNamespace(**config)
    findings = _played_by(options, examination, settings, template) if plays else examination.at_random()
    expert = None
    if file_of(name).suffix == ".py" and not has_errors(findings) and not environments_of(environment):
        from ...teach.experts import find_expert

        if (expert := find_expert(name)) is not None and not plays:
            findings = _with_expert(findings, expert, examination)
    print(*(wrapped(printable(str(finding)), indent=10) for finding in findings), sep="\n")
    if has_errors(findings):
        sys.exit(1)
    print(f"Next: {_next(options, name, own_model, expert is not None, findings)}")


def _first_of_each(tasks: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the first tasks, `number` of each environment."""
    by_name = defaultdict(list)
    for task in tasks:
        by_name[str(task.get(COLUMN))].append(task)
    return [task for rows in by_name.values() for task in rows[:number]]


def _with_expert(findings: list[Finding], expert: Callable, examination: Examination) -> list[Finding]:
    """Return the findings with those of an expert's episodes, which refute or repeat some of them."""
    from ...teach.experts import expert_play

    try:
        tasks = [task for task in examination.tasks for _ in range(EXPERT_EPISODES)]
        factory, rows, answer = expert_play(examination.environment_factory, expert, tasks, examination.episode_limits)
        of_expert = replace(examination, environment_factory=factory, tasks=rows, episodes=1).with_expert(answer)
    except G2POError as error:
        return worst_first([*findings, Kind.REFUSED.found(error=f"the expert: {error}")])
    refuted = set() if any(found.kind is Kind.EXPERT_FAILS for found in of_expert) else {Kind.NO_REWARD}
    return worst_first([*of_expert, *(finding for finding in findings if finding.kind not in refuted)])


def _played_by(
    options: CheckOptions, examination: Examination, settings: Any, template: PromptTemplate | None
) -> list[Finding]:
    """Return the findings of episodes that the model plays."""
    from ...evaluation.chat_models import ServerChat, load_local

    if options.base_url:
        made = partial(ServerChat, options.base_url)
    else:
        check_model("model", options.model)
        made = load_local
    with closing(made(options.model, chat_template_kwargs=settings.chat_template_kwargs)) as chat:
        return examination.with_model(chat, Sampling.of(settings), settings, template)


def _next(options: CheckOptions, name: str, model: str | None, has_expert: bool, findings: Sequence[Finding]) -> str:
    """Return the next command, or what has to change before it. `name`: the full one; `model`: config.yaml's."""
    if Path(name).is_dir():
        return shlex.join(["g2po", "evaluate", "--model", name])
    if options.environment_options:
        return "write functools.partial(…) with the options into a file; then g2po train FILE.py:NAME --model MODEL"
    shown = options.name
    if shown.endswith(".py") and not options.agent:  # `g2po train FILE.py` is a script
        shown = "" if shown == ENVIRONMENT else f"{shown}:{name.rpartition(':')[2]}"
    words = [*["--agent"] * bool(options.agent), *[shown] * bool(shown)]
    words += ["--tasks", str(options.tasks)] if options.tasks else []
    trained = ["--model", options.model] if options.model and not options.base_url else []
    kinds, nothing = {finding.kind for finding in findings}, learns_nothing(findings)
    again = shlex.join(["g2po", "check", *words])
    if Kind.EXPERT_FAILS in kinds or nothing and (Kind.ALL_WON in kinds or options.model and not has_expert):
        return f"what the warnings say, then {again} again"
    if has_expert and (nothing or not options.model):
        return shlex.join(["g2po", "teach", *words, *trained])
    if nothing:
        return f"{again} --model {shlex.quote(model or 'MODEL')} shows whether the model ever succeeds"
    words += ["--agent-state-key", options.agent_state_key] if options.agent_state_key else []
    return shlex.join(["g2po", "train", *words, *(trained or ([] if model else ["--model", "MODEL"]))])
