"""Check an environment or an agent before training: play it at random and report findings, each with a remedy.

    g2po check [environment.py] [--tasks tasks.jsonl]
    g2po check module:Environment --task '{"seed": 1}' [--episodes 8] [--max-turns 30]
    g2po check --agent agent.py                          # an agent, with random answers
    g2po check --agent agent.py --model FOLDER           # a few episodes with a model, also --base-url
    g2po check environment.py --show                     # the first prompt, as the model reads it
    g2po check runs/my-run                               # what a run plays

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), a
dictionary of several, or the address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...engines.sampling import Sampling
from ...environments.adapters.mixed import COLUMN, check_mixture, environments_of
from ...environments.adapters.trl_tools import default_prompt_template, text_environment_factory
from ...environments.agents.agent import agent_factory
from ...environments.episode_limits import EpisodeLimits
from ...environments.loading import binds, load, read_source, resolve_agent_name, resolve_environment_name
from ...environments.pool.limits import PoolLimits
from ...environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ...environments.validation import check_task_columns, player_of
from ...evaluation.contract import Finding
from ...evaluation.examine import examine, examine_agent, try_agent
from ...evaluation.random_episodes import TEXTS, describe_failure
from ...prompts.template import PromptTemplate
from ...runs.run_json import read_run
from ...utils.errors import G2POError
from ...utils.show import printable
from ..parser import option, parse, read_config
from ..played import environment_and_tasks, tasks_of
from ..recipe_files import file_of

TURNS = 30


@dataclass
class CheckOptions(PoolLimits, EpisodeLimits):
    """Options of `g2po check`."""

    environment: str | None = option(
        "file.py[:Class], module:Class, a server, or a run's folder; default: environment.py",
        None,
        positional=True,
        metavar="FILE",
    )
    agent: str | None = option("function (task, client) or AgentCommand", None, metavar="FILE[:NAME]")
    agent_state_key: str | None = option("file.py:FUNCTION: messages -> state key", None, metavar="NAME")
    response: list[str] = option("with --agent: a random answer; may be repeated", [])
    environment_options: dict[str, Any] = option("arguments of the environment", {})
    task: list[str] = option("a dataset row as JSON; may be repeated", [], metavar="JSON")
    tasks: Path | None = option("default: tasks.jsonl; 5 rows are played, 2 with a model", None, metavar="FILE")
    episodes: int | None = option("episodes of each task; default: 8, 4 with a model", None)
    max_turns: int | None = option("default: max_turns of config.yaml, else 30", None)
    show: bool = option("print the first prompt of the first task", False)
    prompt: str | None = option("with --show: module:TEMPLATE; default: the environment's", None, metavar="NAME")
    model: str | None = option("with --agent: play with it; with --show: its chat template", None)
    base_url: str | None = option("with --model: URL of a server, up to /v1", None, metavar="URL")

    def __post_init__(self):
        super().__post_init__()
        for name in ("episodes", "max_turns"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise G2POError(f"{name} is {value}: set it to at least 1")
        if self.agent is None and self.environment is None and not Path("environment.py").is_file():
            self.agent = "agent.py" if Path("agent.py").is_file() else None
        if self.agent is not None and self.environment is not None:
            raise G2POError(f"{self.environment} and --agent {self.agent} are both given: remove one of them")
        is_agent, plays = self.agent is not None, self.agent is not None and not self.show
        conditions = {
            "agent_state_key": (is_agent, "without --agent"),
            "response": (plays and not self.model, "without --agent, and with --model: answers are scripted then"),
            "environment_options": (not is_agent, "with --agent"),
            "prompt": (self.show and not is_agent, "without --show, and with --agent"),
            "model": (is_agent or self.show, "without --show or --agent (g2po evaluate plays an environment)"),
            "base_url": (plays and self.model, "without the name of a model to play with (--model), and with --show"),
        }
        for name, (is_used, when) in conditions.items():
            if getattr(self, name) and not is_used:
                raise G2POError(f"{name} has no effect {when}: leave it out")

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
    config = run.get("play") or _config_beside(name)
    turns, limits = options.max_turns or config.get("max_turns") or TURNS, PoolLimits.of(options)
    given = {one.name: getattr(options, one.name) for one in fields(EpisodeLimits)} | {"max_turns": turns}
    given = {name: config.get(name) if value is None else value for name, value in given.items()}
    episode_limits = EpisodeLimits(**given)
    key = load(options.agent_state_key) if options.agent_state_key else None
    if options.agent is None:
        environment, tasks = environment_and_tasks(name, options.task, options.tasks)
        if options.environment_options:
            environment = partial(environment, **options.environment_options)
    else:
        environment, tasks = agent_factory(name, turns, key), tasks_of(name, options.task, options.tasks)
    tasks = _first_of_each(environment, tasks, max(2 if options.plays_with_model else 5, len(options.task)))
    if options.show:
        print(printable(first_prompt(environment, tasks[0], options.prompt, options.model, turns)))
        return
    played = options.episodes or (4 if options.plays_with_model else 8), turns
    more = {"limits": limits, "episode_limits": episode_limits}
    if options.plays_with_model:
        findings = _try_agents(environment, tasks, options, config, *played, **more)
    elif options.agent is None or environments_of(environment):
        findings = examine(environment, tasks, *played, **more)
    else:
        findings = examine_agent(name, tasks, *played, texts=options.response or TEXTS, state_key=key, **more)
    print(*(printable(str(finding)) for finding in findings), sep="\n")
    if any(finding.level == "error" for finding in findings):
        sys.exit(1)
    print(f"Next: {_next_command(options, config)}")


def _first_of_each(environment: Callable, tasks: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the first tasks, so many for each of several environments."""
    places: Counter[Any] = Counter()
    names, chosen = environments_of(environment), []
    for task in tasks:
        name = str(task.get(COLUMN)) if names else None
        places[name] += 1
        chosen += [task] if places[name] <= number else []
    return chosen


def _config_beside(name: str) -> dict[str, Any]:
    """Return the config.yaml beside FILE.py; empty if there is none."""
    path = file_of(name)
    beside = path.with_name("config.yaml") if path.suffix == ".py" else None
    return read_config(beside if beside and beside.is_file() else None)


def _next_command(options: CheckOptions, config: Mapping[str, Any]) -> str:
    """Return the command that follows: `g2po teach` if the file has an expert and no model was tried."""
    name, path = options.name, file_of(options.name)
    if Path(options.name).is_dir():
        return shlex.join(["g2po", "evaluate", "--model", options.name])
    if options.environment_options:
        return (
            f"write game = functools.partial({name.rpartition(':')[2]}, **{options.environment_options}) into game.py "
            "and tasks into tasks.jsonl beside it; then g2po train game.py:game --model MODEL"
        )
    if not options.agent and name.endswith(".py") and name != "environment.py":  # `g2po train FILE.py` is a script
        name = f"{name}:{resolve_environment_name(name).rpartition(':')[2]}"
    words = ["--agent", name] if options.agent else [] if name == "environment.py" else [name]
    words += ["--tasks", str(options.tasks)] if options.tasks else []
    if not options.model and path.suffix == ".py" and binds(read_source(path), "expert"):
        return shlex.join(["g2po", "teach", *words])
    words += ["--agent-state-key", options.agent_state_key] if options.agent_state_key else []
    if options.model and not options.base_url:
        words += ["--model", options.model]
    elif not config.get("model_name_or_path"):
        words += ["--model", "MODEL"]
    return shlex.join(["g2po", "train", *words])


def _try_agents(
    environment: Callable,
    tasks: Sequence[dict[str, Any]],
    options: CheckOptions,
    config: Mapping[str, Any],
    *played: Any,
    **more: Any,
) -> list[Finding]:
    """Return the findings of `try_agent`, of several agents for each, with training's sampling and lengths."""
    from ...config import G2POConfig  # with torch, which is slow to import
    from ...evaluation.chat_models import load_local
    from ...evaluation.server_chat import ServerChat

    setting = SimpleNamespace(**{one.name: one.default for one in fields(G2POConfig)} | dict(config))
    template = setting.chat_template_kwargs
    try:
        chat = (
            ServerChat(options.base_url, options.model, chat_template_kwargs=template)
            if options.base_url
            else load_local(options.model, chat_template_kwargs=template)
        )
    except (OSError, ValueError) as error:
        raise G2POError(f"model is {options.model!r}, which cannot be loaded: {error}") from error
    how = chat, Sampling.of(setting), setting.max_prompt_length
    with closing(chat):
        if not environments_of(environment):
            bound = environment.keywords
            return try_agent(bound["agent"], tasks, *played, *how, state_key=bound.get("state_key"), **more)
        check_mixture(environment, {"check": tasks})
        findings = []
        for name, one in environments_of(environment).items():
            rows = [dict(player_of(environment, task)[1]) for task in tasks if task[COLUMN] == name]
            own = {
                **more,
                "episode_limits": more["episode_limits"].by(name),
                "state_key": one.keywords.get("state_key"),
            }
            found = try_agent(one.keywords["agent"], rows, *played, *how, **own)
            findings += [replace(finding, text=f"{name}: {finding.text}") for finding in found]
        return findings


def first_prompt(
    environment_factory: Callable, task: dict[str, Any], prompt: str | None, model: str | None, turns: int
) -> str:
    """Return a task's first prompt as text with its length; with a model, as its chat template renders it."""
    environment_factory, task = player_of(environment_factory, task)
    template = load(prompt) if prompt else default_prompt_template(environment_factory)
    if not isinstance(template, PromptTemplate):
        raise G2POError(f"prompt is {prompt!r}, which is not a PromptTemplate: name one")
    environment_factory = text_environment_factory(environment_factory, EpisodeLimits(turns))
    check_task_columns(environment_factory, task)
    with EnvironmentPool(environment_factory, PoolLimits(num_environment_workers=1)) as pool:
        (first,) = pool.reset([task])
    if isinstance(first, EnvironmentFailure):
        raise G2POError(f"the environment {describe_failure(first)}")
    if first.request is None:
        messages, tools = template.messages(first.text, first.task or "", first.admissible_actions), None
    else:
        messages, tools = first.request.messages, first.request.tools
    if model is None:
        texts = [f"--- {message['role']} ---\n{message['content']}" for message in messages]
        texts += [f"--- tools ---\n{json.dumps(tools, ensure_ascii=False, indent=2)}"] if tools else []
        return "\n".join([*texts, f"--- {sum(len(m['content']) for m in messages)} characters ---"])
    from transformers import AutoTokenizer  # slow to import

    from ...prompts.chat_template import get_chat_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    if get_chat_template(tokenizer) is None:
        raise G2POError(f"model is {model!r}, whose tokenizer has no chat template: pass another")
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    number = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return f"{text}\n--- {number} tokens ---"
