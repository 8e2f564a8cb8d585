"""Check an environment or an agent before training: play it at random and report findings, each with a remedy.

    g2po check                                           # environment.py here, or agent.py; their tasks.jsonl
    g2po check module:Environment --task '{"seed": 1}' --episodes 8 --max-turns 30
    g2po check --agent agent.py                          # an agent, with random answers
    g2po check --model FOLDER                            # a few episodes with a model, also --base-url

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
from ...environments.several import COLUMN, environments_of, mixed
from ...utils.errors import G2POError
from ...utils.options import option, require
from ...utils.show import printable, wrapped
from ..parser import Keys, parse
from ..recipe_files import ENVIRONMENT, check_model, environment_or_agent, keys_beside, tasks_of

TURNS, EXPERT_EPISODES = 30, 4  # of each task: an expert may be random


@dataclass
class CheckOptions(PoolLimits, EpisodeLimits):
    """Options of `g2po check`."""

    environment: str | None = option("or module:Class, a server", None, positional=True, metavar="[FILE[:Class]]")
    agent: str | None = option("function (task, client) or AgentCommand", None, metavar="FILE[:NAME]")
    agent_state_key: str | None = option("FILE:FUNCTION: messages -> key", None, metavar="NAME", needs="agent")
    response: list[str] = option("a text that the random model may answer; may be repeated", [], needs="agent")
    task: list[dict[str, Any]] = option("a dataset row as JSON; may be repeated", [], metavar="JSON")
    tasks: Path | None = option("default: tasks.jsonl; 5 rows are played, 2 with a model", None, metavar="FILE")
    episodes: int | None = option("episodes of each task; default: 8, 4 with a model", None, within="[1, inf)")
    max_turns: int | None = option(f"default: max_turns of config.yaml, else {TURNS}", None, within="[1, inf)")
    prompt: str | None = option("module:TEMPLATE", None, metavar="NAME", needs="model")
    model: str | None = option("play a few episodes with this model", None)
    base_url: str | None = option("with --model: URL of a server, up to /v1", None, metavar="URL", needs="model")

    def __post_init__(self):
        super().__post_init__()
        name, where = ("response", "with --model") if self.model else ("max_episode_tokens", "without --model")
        value = getattr(self, name)
        require(not value, name, value, f"it has no effect {where}; leave it out")
        self.environment, self.agent = environment_or_agent(self.environment, self.agent)


def main(argv: Sequence[str] | None = None) -> None:
    """Check. Exit code 1 if there is an error."""
    options, _ = parse((CheckOptions,), argv, command="g2po check", description=__doc__)
    resolve = resolve_agent_name if options.agent else resolve_environment_name
    name, model = resolve(options.agent or options.environment or ENVIRONMENT), options.model
    config = keys_beside({"environment": name})
    given = {field: value for field, value in vars(options).items() if value is not None}
    limits = EpisodeLimits.of(SimpleNamespace(**{"max_turns": TURNS, **config, **given}))
    if options.agent:
        key = load(options.agent_state_key) if options.agent_state_key else None
        environment = agent_factory(name, limits.max_turns, key)
    else:
        environment = mixed(load(name))
    if model and not options.base_url:
        check_model("model", model)
    of_each = defaultdict(list)
    for task in tasks_of(name, options.task, options.tasks):
        of_each[str(task.get(COLUMN))].append(task)
    most = max(2 if model else 5, len(options.task))
    examination = Examination(
        environment,
        tasks=[task for rows in of_each.values() for task in rows[:most]],
        episodes=options.episodes or (4 if model else 8),
        episode_limits=limits,
        limits=PoolLimits.of(options),
        **{name: config.get(name) for name in ("state_key", "state_key_ignores")},
        texts=options.response or TEXTS,
        model=None if options.base_url else model or config.get("model_name_or_path"),
    )
    findings = _with_model(examination, options, config) if model else examination.at_random()
    expert = None
    if file_of(name).suffix == ".py" and not has_errors(findings) and not environments_of(environment):
        from ...teach.experts import find_expert

        expert = find_expert(name)
        if expert is not None and not model:
            findings = _with_expert(findings, expert, examination)
    print(*(wrapped(printable(str(finding)), indent=10) for finding in findings), sep="\n")
    if has_errors(findings):
        sys.exit(1)
    print(f"Next: {_next(options, config.get('model_name_or_path'), expert is not None, findings)}")


def _with_model(examination: Examination, options: CheckOptions, config: Keys) -> list[Finding]:
    """Return the findings of episodes that a model plays with the settings of config.yaml."""
    from ...config import G2POConfig  # with torch, which is slow to import
    from ...evaluation.chat_models import ServerActor, ServerChat, load_local

    settings = SimpleNamespace(**{field.name: field.default for field in fields(G2POConfig)} | dict(config))
    prompt = options.prompt or config.get("prompt")
    template = load_template(prompt) if prompt else None
    kwargs = {"chat_template_kwargs": settings.chat_template_kwargs}
    server = options.base_url and ServerChat(options.base_url, options.model, **kwargs)
    with closing(ServerActor(server) if server else load_local(options.model, **kwargs)) as actor:
        return examination.with_model(actor, Sampling.of(settings), settings, template)


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


def _next(options: CheckOptions, model: str | None, has_expert: bool, findings: Sequence[Finding]) -> str:
    """Return the next command, or what has to change before it. `model`: config.yaml's."""
    words = ["--agent", options.agent] if options.agent else [options.environment]
    words = [] if words == [ENVIRONMENT] else words
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
