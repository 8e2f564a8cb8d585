"""The arguments of `g2po evaluate`: flags, a YAML file, and what a run was trained with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..arguments import Parser
from .run_description import FILE, find_run, read_run

HELP = """usage: g2po evaluate --model MODEL [--environment NAME] [--agent NAME] [--OPTION VALUE ...]

Play every task of a panel once per seed, and print success and other rates: mean ± standard deviation over seeds.

    g2po evaluate --model runs/alfworld-tiny --seeds 3
    g2po evaluate --model Qwen/Qwen2.5-7B-Instruct --engine vllm --environment webshop --agent react
    g2po evaluate --model gpt-4o --base-url https://api.openai.com/v1 --environment alfworld \\
        --panel valid_unseen --agent reflexion --config agents/reflexion --max-total-tokens 2000000
    g2po evaluate --model MODEL --environment my_game.py:MyGame --tasks tasks.jsonl

A model in the folder of a training run is evaluated as it was trained, unless options say otherwise.

run        --seeds N                  play seeds 0 … N-1 (default 1)
           --output FOLDER            trajectories, settings, results; the same command resumes; --overwrite
           --config FILE|NAME         YAML file with these options, or agents/react, …; flags win
model      --model FOLDER|ID|NAME     a checkpoint or an adapter, or what a server calls its model
           --engine transformers|vllm, --engine-options JSON        in this process
           --base-url URL, --parallel N                             a server with OpenAI's protocol
           --key-variable NAME        environment variable with the server's key (OPENAI_API_KEY)
           --run FOLDER               training run whose settings are the defaults (the model's)
tasks      --environment NAME         alfworld, webshop, appworld, my_game.py:MyGame; --environment-options JSON
           --panel NAME, --panel-options JSON                       which tasks of the environment
           --tasks FILE               for an environment of your own: one task per line, as JSON
           --limit N                  the first N tasks only
agent      --agent direct|react|reflexion   direct: asked as in training; --trials N (reflexion)
           --prompt module:TEMPLATE, --chat-template-kwargs JSON
           --max-turns N, --history-length N, --max-prompt-length N
sampling   --temperature X (0.4), --top-p X, --top-k N, --min-p X, --repetition-penalty X
           --max-tokens N, --stop TEXT, --stop-after TEXT           how long a reply may be, where it ends
limits     --max-total-tokens N       stop before the next turn once prompt + completion tokens reach N
           --max-error-rate X         exit code 1 above this fraction of environment errors (0.1)
           --batch-size N, --num-environment-workers N              concurrent episodes, worker processes
           --environment-reset-timeout S, --environment-step-timeout S, --environment-load-timeout S
           --environment-variables NAME …                           passed although they look like secrets

--help-all: every option with its default.  --debug: the traceback of an error.
"""
AGENTS = ("direct", "react", "reflexion")
_RESTORE = (
    "it was edited, or written by another version of g2po_trl; write there what the run was trained with, or move "
    "the file away to give all settings by hand"
)
ENVIRONMENTS = ("alfworld", "webshop", "appworld")


# What a name of a run's "play" may hold. The numbers of an evaluation depend on these: none has a default.
_OPTIONAL = (type(None),)
_SAMPLING = {"temperature": (float, int), "top_p": (float, int), "top_k": (int,), "min_p": (float, int, *_OPTIONAL)}
_SAMPLING["repetition_penalty"] = (float, int)
_LENGTHS = {"max_turns": (int,), "history_length": (int,), "max_prompt_length": (int, *_OPTIONAL)}
_LENGTHS |= {"max_completion_length": (int,), "stop_sequences": (list, *_OPTIONAL)}
# Without these an environment plays the same, or fails and says why: those that are missing are as for any model.
_OF_WORKERS = {"environment_reset_timeout": (float, int), "environment_step_timeout": (float, int)}
_OF_WORKERS["environment_load_timeout"] = (float, int, *_OPTIONAL)
_OF_WORKERS["environment_variables"] = (list, *_OPTIONAL)


def run_defaults(run: Mapping[str, Any], folder: Path, agent: str, environment: str | None) -> dict[str, Any]:
    """The arguments that evaluate a run's model as it was trained.

    Args:
        run: its description, see `run_description`. folder: where it is.
        agent: only "direct" reads the run's prompts; others keep their own lengths and history.
        environment: as asked for; of another than the run's only the chat template's arguments are taken over.

    Raises:
        ValueError: when something is missing or of the wrong type that the numbers would depend on.
    """
    file = folder / FILE
    if "play" not in run and "trainer" not in run:
        return {}  # another program's file of this name
    play = _part(run, "play", file)
    template = _value(play, "chat_template_kwargs", (dict, *_OPTIONAL), file)
    defaults: dict[str, Any] = {"chat_template_kwargs": template or {}}
    trained_on = dict(run.get("evaluation") or {})
    if not trained_on and run.get("environment") is not None:
        described = _part(run, "environment", file)
        if described.get("args"):
            raise ValueError(f"environment.args is {described['args']} in {file}: give them by name in its kwargs")
        trained_on = {
            "environment": _value(described, "import", (str,), file, "environment"),
            "environment_options": _value({"kwargs": {}, **described}, "kwargs", (dict,), file, "environment"),
            "tasks": folder / "panels" / "eval.jsonl",
        }
    if environment not in (None, trained_on.get("environment")):
        return defaults
    defaults |= trained_on
    defaults |= {name: _value(play, name, types, file) for name, types in _OF_WORKERS.items() if name in play}
    defaults["environment_variables"] = defaults.get("environment_variables") or []
    defaults |= {name: _value(play, name, types, file) for name, types in _SAMPLING.items()}
    if agent == "direct":
        lengths = {name: _value(play, name, types, file) for name, types in _LENGTHS.items()}
        defaults |= {
            "prompt": _part(run, "prompt", file),
            "max_turns": lengths["max_turns"],
            "trained_history_length": lengths["history_length"],
            "max_prompt_length": lengths["max_prompt_length"],
            "max_tokens": lengths["max_completion_length"],
            "stop_after": lengths["stop_sequences"] or [],
        }
    return defaults


def _part(run: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    if not isinstance(part := run.get(name), Mapping):
        found = "is missing" if part is None else f"is {part!r}"
        raise ValueError(f"{name} {found} in {file}: {_RESTORE}")
    return part


def _value(part: Mapping[str, Any], name: str, types: tuple[type, ...], file: Path, of: str = "play") -> Any:
    if name not in part:
        raise ValueError(f"{of}.{name} is missing in {file}: {_RESTORE}")
    value = part[name]
    if not isinstance(value, types) or isinstance(value, bool):
        names = " or ".join(kind.__name__ for kind in types).replace("NoneType", "null")
        raise ValueError(f"{of}.{name} is {value!r} in {file}: write what the run was trained with ({names})")
    return value


def make_parser() -> Parser:
    """The parser, with the defaults of a model that is no run's."""
    parser = Parser(prog="g2po evaluate", usage=HELP.partition("\n")[0].removeprefix("usage: "), short_help=HELP)
    add = parser.add_argument
    add("--config", metavar="FILE", type=Path, help="YAML file with any of these options; flags win")
    add("--output", metavar="FOLDER", type=Path, help="default: evaluations/<environment>-<agent>-<model>")
    add("--overwrite", action="store_true", help="delete the evaluation that the output folder holds")
    add("--seeds", metavar="N", type=int, default=1, help="number of seeds; seeds 0 … N-1 are played; default: 1")
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="NAME", help="a folder, a Hub id, or the name of a served model")
    of_run = "folder of the training run whose settings are the defaults; default: the model's"
    add("--run", metavar="FOLDER", type=Path, help=of_run)
    add(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="loads the model in this process; default: transformers",
    )
    add("--engine-options", metavar="JSON", type=json.loads, default={}, help="passed to the model's constructor")
    add("--base-url", metavar="URL", help="URL of a server with OpenAI's protocol, up to /v1")
    add(
        "--key-variable",
        metavar="NAME",
        default="OPENAI_API_KEY",
        help="environment variable with the server's key; default: OPENAI_API_KEY",
    )
    add("--parallel", metavar="N", type=int, default=16, help="concurrent requests; default: 16")
    add = parser.add_argument_group("tasks").add_argument
    add("--environment", metavar="NAME", help=f"{', '.join(ENVIRONMENTS)}, or module:Class; default: the run's")
    add("--environment-options", metavar="JSON", type=json.loads, default={}, help="arguments of module:Class")
    add("--panel", metavar="NAME", help="which tasks; default: the run's, or the environment's first")
    add("--panel-options", metavar="JSON", type=json.loads, default={}, help="passed to the environment's load_panel")
    add("--tasks", metavar="FILE", type=Path, help="for module:Class: a file with one task per line, as JSON")
    add("--limit", metavar="N", type=int, help="evaluate only the first N tasks")
    add = parser.add_argument_group("agent").add_argument
    add("--agent", choices=AGENTS, default="direct", help="default: direct, as trained")
    add("--trials", metavar="N", type=int, default=3, help="trials per task (reflexion only); default: 3")
    add("--prompt", metavar="NAME", help="module:TEMPLATE, a PromptTemplate; default: the run's, or the panel's")
    add("--chat-template-kwargs", metavar="JSON", type=json.loads, default={}, help="passed to the chat template")
    add("--max-turns", metavar="N", type=int, help="turns of an episode; default: the run's, or the panel's")
    length = "past steps in a prompt; default: the run's or the panel's, 30 in conversations"
    add("--history-length", metavar="N", type=int, help=length)
    length = "tokens of a prompt; longer ones lose history, as in training (not for servers)"
    add("--max-prompt-length", metavar="N", type=int, help=length)
    add = parser.add_argument_group("sampling (defaults: the run's, else these)").add_argument
    add("--temperature", metavar="X", type=float, default=0.4, help="0: greedy; default: 0.4")
    add("--top-p", metavar="X", type=float, default=1.0, help="default: 1")
    add("--top-k", metavar="N", type=int, default=0, help="default: 0, off")
    add("--min-p", metavar="X", type=float, help="default: off")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="default: 1, off")
    add("--max-tokens", metavar="N", type=int, default=512, help="maximum tokens of a completion; default: 512")
    add("--stop", metavar="TEXT", action="append", help="end completions before this text; may be repeated")
    add("--stop-after", metavar="TEXT", action="append", help="end completions after this text; may be repeated")
    add = parser.add_argument_group("limits and workers").add_argument
    add("--batch-size", metavar="N", type=int, default=32, help="concurrent episodes; default: 32")
    budget = "token budget: stop before the next turn once prompt + completion tokens reach this"
    add("--max-total-tokens", metavar="N", type=int, help=budget)
    share = "exit code 1 above this fraction of environment errors; default: 0.1"
    add("--max-error-rate", metavar="X", type=float, default=0.1, help=share)
    add("--num-environment-workers", metavar="N", type=int, help="default: one per core")
    add(
        "--environment-reset-timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="maximum seconds of a reset; default: 120",
    )
    add(
        "--environment-step-timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="maximum seconds of a step; default: 60",
    )
    load = "maximum seconds to import the environment; default: as a reset, at least 60"
    add("--environment-load-timeout", metavar="S", type=float, help=load)
    passed = "pass these variables to the environment although they look like secrets"
    add("--environment-variables", metavar="NAME", nargs="*", default=[], help=passed)
    parser.set_defaults(trained_history_length=None)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments: flags, then --config, then those of the model's run, then the defaults."""
    parser = make_parser()
    given = _read_config(parser, parser.parse_known_args(argv)[0].config)
    parser.set_defaults(**{name: value for name, value in given.items() if name not in ("stop", "stop_after")})
    first, _ = parser.parse_known_args(argv)
    if first.model is None:
        parser.error("--model is missing")
    folder = find_run(first.run or first.model) if first.run or not first.base_url else None
    if first.run and not folder:
        parser.error(f"run is {str(first.run)!r}: there is no run.json, which the trainer writes into its output_dir")
    try:
        defaults = run_defaults(read_run(folder), folder, first.agent, first.environment) if folder else {}
    except ValueError as error:
        parser.error(str(error))
    merged = {**defaults, **given}
    options = {**defaults.get("panel_options", {}), **given.get("panel_options", {})}
    # argparse would add to a list, and replace a dictionary.
    lists = {name: merged.pop(name, []) for name in ("stop", "stop_after")}
    parser.set_defaults(**{**merged, "panel_options": options})
    args = parser.parse_args(argv)
    args.panel_options = {**options, **args.panel_options}
    for name, default in lists.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    _check(parser, args)
    if args.output is None:
        name = f"{args.environment.split(':')[-1]}-{args.agent}-{Path(args.model).name}"
        args.output = Path("evaluations", name)
    return args


def _read_config(parser: argparse.ArgumentParser, path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"config is {str(path)!r}, which cannot be read: {error}")
    given = {str(name).replace("-", "_"): value for name, value in given.items()}
    known = {action.dest: action for action in parser._actions}
    if unknown := sorted(set(given) - set(known)):
        parser.error(f"{path}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    for name, value in given.items():
        if known[name].choices and value not in known[name].choices:
            parser.error(f"{path}: {name} is {value!r}: choose one of {', '.join(known[name].choices)}")
    return given


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.environment is None:
        why = (
            "has no run.json that names one" if Path(args.model).is_dir() else "is no folder of a run, which names one"
        )
        parser.error(f"--environment is missing: {args.model} {why}")
    for name in ("seeds", "batch_size", "trials", "max_tokens", "parallel", "limit", "max_turns", "max_prompt_length"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"{name} is {getattr(args, name)}: set it to at least 1")
    if args.temperature < 0:
        parser.error(f"temperature is {args.temperature}: set it to at least 0 (greedy)")
    if not 0 <= args.max_error_rate <= 1:
        parser.error(f"max_error_rate is {args.max_error_rate}: set it between 0 and 1")
