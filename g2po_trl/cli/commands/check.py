"""Check an environment or an agent before training: play it at random and report findings, each with a remedy.

    g2po check [environment.py] [--tasks tasks.jsonl]
    g2po check module:Environment --task '{"seed": 1}' [--episodes 8] [--turns 30]
    g2po check --agent agent.py                          # an agent, with random answers
    g2po check --agent agent.py --model FOLDER           # a few episodes with a model, also --base-url
    g2po check environment.py --show                     # the first prompt, as the model reads it

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), or the
address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.

`check_environment` checks the contract in this process. `examine` checks it in worker processes with time limits, as
in training, and plays random episodes to find out whether a model can learn in the environment: does a task start the
same in another process, are admissible actions admissible, how fast is a step, do states recur so that there is a
graph, do random actions ever succeed, do the same actions lead to the same states?
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ...environments.adapters.agent import agent_factory
from ...environments.adapters.trl_tools import text_environment_factory
from ...environments.loading import binds, load, read_source, resolve_agent_name
from ...environments.pool.limits import PoolLimits
from ...environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ...environments.tasks import read_tasks
from ...environments.validation import check_task_columns
from ...evaluation.agent_report import TEXTS, examine_agent, try_agent
from ...evaluation.environment_report import describe_failure, examine
from ...evaluation.random_episodes import Finding
from ...utils.parser import Parser, json_object, read_config
from ...utils.show import printable
from .train import file_of

TURNS = 30
SMALL_VOCABULARY = 5000  # tokens; a bundled model's has fewer, a pretrained model's more


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
    add = parser.add_argument
    add("environment", nargs="?", help="file.py[:Class], module:Class, or a server; default: environment.py")
    add("--agent", metavar="FILE[:NAME]", help="function (task, client) or AgentCommand")
    add("--agent-state-key", metavar="NAME", help="file.py:FUNCTION: messages -> state key")
    response = "with --agent: a random answer; may be repeated"
    add("--response", metavar="TEXT", action="append", default=[], help=response)
    add("--environment-options", metavar="JSON", type=json_object, default={}, help="arguments of the environment")
    add("--task", metavar="JSON", action="append", default=[], help="a dataset row as JSON; may be repeated")
    tasks = "default: tasks.jsonl; 5 rows are played, 2 with a model"
    add("--tasks", metavar="FILE", type=Path, help=tasks)
    add("--episodes", metavar="N", type=int, help="episodes of each task; default: 8, 4 with a model")
    add("--turns", metavar="N", type=int, help="default: max_turns of config.yaml, else 30")
    add("--timeout", metavar="S", type=float, default=60.0, help="maximum seconds of a reset or a step; default: 60")
    passed = "pass these although they look like secrets"
    add("--environment-variables", metavar="NAME", nargs="*", default=[], help=passed)
    add("--show", action="store_true", help="print the first prompt of the first task")
    template = "with --show: module:TEMPLATE, a PromptTemplate; default: the environment's"
    add("--prompt", metavar="NAME", help=template)
    model = "with --agent: play with it; with --show: its chat template and number of tokens"
    add("--model", metavar="FOLDER|ID", help=model)
    add("--base-url", metavar="URL", help="with --model: URL of a server, up to /v1")
    args = parser.parse_args(argv)
    for name in ("episodes", "turns", "timeout"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"{name} is {getattr(args, name):g}: set it above 0")
    if args.agent is None and args.environment is None and not Path("environment.py").is_file():
        args.agent = "agent.py" if Path("agent.py").is_file() else None
    _check_combination(parser, args)
    with_model = args.model is not None and not args.show
    args.episodes = args.episodes or (4 if with_model else 8)
    try:
        if args.agent is not None:
            name = resolve_agent_name(args.agent)
            config = _config_beside(name)
            args.turns = args.turns or config.get("max_turns", TURNS)
            tasks = tasks_of(name, args.task, args.tasks)
            played = partial(examine_agent, name, texts=args.response or TEXTS)
            if with_model:
                played = partial(_try_agent, name, args.model, args.base_url, config)
            if args.agent_state_key:
                played = partial(played, state_key=load(args.agent_state_key))
            environment = agent_factory(name, args.turns)
        else:
            name = args.environment or "environment.py"
            environment, tasks = environment_and_tasks(name, args.task, args.tasks)
            args.turns = args.turns or _config_beside(name).get("max_turns")
            if args.environment_options:
                environment = partial(environment, **args.environment_options)
            played = partial(examine, environment)
        tasks, args.turns = tasks[: max(2 if with_model else 5, len(args.task))], args.turns or TURNS
        if args.show:
            print(first_prompt(environment, tasks[0], args.prompt, args.model, args.turns))
            return
    except ValueError as error:
        raise SystemExit(str(error)) from error
    findings = played(
        tasks,
        args.episodes,
        args.turns,
        timeout=args.timeout,
        environment_variables=args.environment_variables,
    )
    failed = any(finding.level == "error" for finding in findings)
    if not failed and args.agent is None:
        findings = _spelling(environment, tasks, args) + findings
    print(*(printable(str(finding)) for finding in findings), sep="\n")
    if not failed:
        print(f"Next: {_next_command(args)}")
    sys.exit(failed)


def _config_beside(name: str) -> dict[str, Any]:
    """Return the config.yaml beside FILE.py; empty if there is none."""
    path = file_of(name)
    beside = path.with_name("config.yaml") if path.suffix == ".py" else None
    return read_config(beside if beside and beside.is_file() else None)


def _spelling(environment: Callable, tasks: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[Finding]:
    """Return a warning if config.yaml's model has a small tokenizer without tokens for words of the first actions."""
    model = _config_beside(args.environment or "environment.py").get("model_name_or_path")
    file = Path(str(model), "tokenizer.json")
    if model is None or not file.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > SMALL_VOCABULARY:
        return []
    limits = PoolLimits(1, args.timeout, environment_variables=args.environment_variables)
    with EnvironmentPool(text_environment_factory(environment, args.turns), limits) as pool:
        starts = [start for start in pool.reset(tasks) if not isinstance(start, EnvironmentFailure)]
    words = {word for start in starts for action in start.admissible_actions or () for word in action.split()}
    words = sorted(word for word in words if re.fullmatch(r"[^\W\d_]+", word))
    spelled = [word for word in words if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) > 1]
    if not spelled:
        return []
    shown = ", ".join(spelled[:8]) + (", …" if len(spelled) > 8 else "")
    text = f"the model's tokenizer spells {shown} in pieces, which a model of this size is slow to learn"
    return [Finding("warning", f"{text}. Use words of {file}, or a larger model.")]


def _next_command(args: argparse.Namespace) -> str:
    """Return the command that follows: `g2po teach` if the file has an expert and no model was tried.

    It has what this one was given, and a place for the model where nothing names one.
    """
    name = args.agent or args.environment or "environment.py"
    target = f"--agent {shlex.quote(name)}" if args.agent else "" if name == "environment.py" else shlex.quote(name)
    path = file_of(name)
    tasks = f"--tasks {shlex.quote(str(args.tasks))}" if args.tasks else ""
    if args.environment_options:
        return (
            f"write game = functools.partial({name.rpartition(':')[2]}, **{args.environment_options}) into game.py "
            "and tasks into tasks.jsonl beside it; then g2po train game.py:game --model MODEL"
        )
    if not args.model and path.suffix == ".py" and binds(read_source(path), "expert"):
        return " ".join(filter(None, ["g2po teach", target, tasks]))
    key = f"--agent_state_key {shlex.quote(args.agent_state_key)}" if args.agent_state_key else ""
    model = f"--model {shlex.quote(args.model)}" if args.model and not args.base_url else ""
    if not model and not _config_beside(name).get("model_name_or_path"):
        model = "--model MODEL"
    return " ".join(filter(None, ["g2po train", target, tasks, key, model]))


def _try_agent(
    name: str, model: str, base_url: str | None, config: Mapping[str, Any], *arguments: Any, **options: Any
) -> list[Finding]:
    """Return the findings of `try_agent`, with sampling and lengths as training has them."""
    from ...config import G2POConfig  # with torch, which is slow to import
    from ...evaluation.chat_models import ChatError, ChatSettings, load_local
    from ...evaluation.server_chat import ServerChat

    setting = {field.name: field.default for field in fields(G2POConfig)} | dict(config)
    sampling = {key: setting[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    sampling |= {"max_tokens": setting["max_completion_length"], "stop_after": setting["stop_sequences"] or ()}
    template = setting["chat_template_kwargs"]
    try:
        chat = (
            ServerChat(base_url, model, chat_template_kwargs=template) if base_url else load_local(model, 32, template)
        )
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"model is {model!r}, which cannot be loaded: {error}") from error
    try:
        settings = ChatSettings(**sampling)
        return try_agent(name, arguments[0], chat, *arguments[1:], settings, setting["max_prompt_length"], **options)
    except (ChatError, ValueError) as error:
        raise SystemExit(str(error)) from error
    finally:
        chat.close()


def _check_combination(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse options that have no effect together."""
    if args.agent is None:
        for name in ("agent_state_key", "response", "base_url"):
            if getattr(args, name):
                parser.error(f"--{name.replace('_', '-')} has no effect without --agent: add it, or leave it out")
        if not args.show and (args.model or args.prompt):
            parser.error(
                "--model and --prompt have no effect without --show: add it, or leave them out (g2po evaluate plays "
                "an environment with a model)"
            )
        return
    if args.environment is not None:
        parser.error(f"{args.environment} and --agent {args.agent} are both given: remove one of them")
    for name in ("environment_options", "prompt"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} has no effect with --agent: leave it out")
    if args.base_url and (args.show or not args.model):
        parser.error("--base-url needs the name of a model to play with: pass --model, and no --show")
    if args.response and args.model:
        parser.error("--response and --model are both given: answers are scripted or a model's; remove one of them")


def environment_and_tasks(
    name: str, given: Sequence[str] = (), file: Path | None = None
) -> tuple[Callable, list[dict[str, Any]]]:
    """Return an environment's factory, by the names that `load` takes, and its tasks, see `tasks_of`."""
    if name == "environment.py" and not Path(name).is_file():
        raise ValueError("there is no environment.py here: name an environment, as file.py or module:Class")
    return load(name), tasks_of(name, given, file)


def tasks_of(name: str, given: Sequence[str] = (), file: Path | None = None) -> list[dict[str, Any]]:
    """Return the tasks in JSON or a file, by default tasks.jsonl beside file.py; else one without arguments."""
    path = Path(name.rpartition(":")[0] if ":" in name else name)
    beside = path.with_name("tasks.jsonl")
    if not given and file is None and path.suffix == ".py" and beside.is_file():
        file = beside
    tasks = [_task(text) for text in given] + (read_tasks(file) if file else [])
    return tasks or [{}]


def first_prompt(
    environment_factory: Callable, task: dict[str, Any], prompt: str | None, model: str | None, turns: int
) -> str:
    """Return a task's first prompt as text with its length; with a model, as its chat template renders it."""
    from ...environments.adapters.trl_tools import default_prompt_template
    from ...prompts.template import PromptTemplate

    template = load(prompt) if prompt else default_prompt_template(environment_factory)
    if not isinstance(template, PromptTemplate):
        raise ValueError(f"prompt is {prompt!r}, which is not a PromptTemplate: name one")
    environment_factory = text_environment_factory(environment_factory, turns)
    check_task_columns(environment_factory, task)
    with EnvironmentPool(environment_factory, PoolLimits(1)) as pool:
        (first,) = pool.reset([task])
    if isinstance(first, EnvironmentFailure):
        raise ValueError(f"the environment {describe_failure(first)}")
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
        raise ValueError(f"model is {model!r}, whose tokenizer has no chat template")
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    number = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return f"{text}\n--- {number} tokens ---"
