"""The arguments of `g2po evaluate`: flags, a YAML file, and what a run was trained with."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engines.sampling import reserved_option
from ..environments.loading import resolve_agent_name, resolve_environment_name
from ..runs.run_json import AGENT_ENVIRONMENT, FILE, find_run, name_of_agent, read_run
from ..utils.masking import masked_names
from ..utils.parser import Parser, json_object, read_config
from .run_defaults import HISTORIES, check_is_there, run_defaults, same_environment

HELP = """usage: g2po evaluate --model MODEL [--environment NAME] [--agent NAME] [--OPTION VALUE ...]

Play every task of an evaluation set once per seed, and print success and other rates: mean ± standard deviation over
seeds.

    g2po evaluate --model runs/alfworld-tiny --seeds 3
    g2po evaluate --model Qwen/Qwen2.5-7B-Instruct --engine vllm --environment webshop --agent react
    g2po evaluate --model gpt-4o --base-url https://api.openai.com/v1 --environment alfworld \\
        --panel valid_unseen --agent reflexion --config agents/reflexion --max-total-tokens 2000000
    g2po evaluate --model MODEL --environment my_game.py:MyGame --tasks tasks.jsonl
    g2po evaluate --model MODEL --agent my_agent.py --tasks tasks.jsonl

A model in the folder of a training run is evaluated with the run's settings, unless options override them.

run        --seeds N                  play seeds 0 … N-1 (default 1)
           --output FOLDER            trajectories, settings, results; the same command resumes; --overwrite
           --config FILE|NAME         YAML file with these options, or agents/react, …; flags override it
model      --model FOLDER|ID|NAME     a checkpoint or an adapter, or the name of a server's model
           --engine transformers|vllm, --engine-options JSON        in this process
           --base-url URL, --parallel N                             a server with OpenAI's protocol
           --key-variable NAME        environment variable with the server's key (OPENAI_API_KEY)
           --run FOLDER               training run whose settings are the defaults (default: the model's)
tasks      --environment NAME         alfworld, sokoban, textworld, webshop, appworld, my_game.py:MyGame;
           --environment-options JSON
           --panel NAME, --panel-options JSON                       evaluation set of the environment or the run
           --tasks FILE               for your own environment: one task per line, as JSON
           --limit N                  the first N tasks only
agent      --agent direct|react|reflexion   direct: prompted as in training; --trials N (reflexion)
           --agent FILE.py[:NAME]     your own agent, a function (task, client), as in training
           --prompt module:TEMPLATE, --chat-template-kwargs JSON
           --history window|conversation    what prompts show of an episode (default: the run's)
           --max-turns N, --history-length N, --max-prompt-length N
sampling   --temperature X (0.4), --top-p X, --top-k N, --min-p X, --repetition-penalty X
           --max-tokens N, --stop TEXT, --stop-after TEXT           where a completion ends
           --generation-kwargs JSON   more options of the engine (default: the run's)
limits     --max-total-tokens N       stop before the next turn once prompt + completion tokens reach N
           --max-error-rate X         exit code 1 above this fraction of environment errors (0.1)
           --batch-size N, --num-environment-workers N              concurrent episodes, worker processes
           --environment-reset-timeout S, --environment-step-timeout S, --environment-load-timeout S
           --environment-episode-timeout S, --environment-worker-resets N, --environment-worker-memory-mb N
           --environment-variables NAME …                           variables to pass although they look like secrets

--help-all: every option with its default.  --debug: the traceback of an error.
"""
AGENTS = ("direct", "react", "reflexion")
ENVIRONMENTS = ("alfworld", "sokoban", "textworld", "webshop", "appworld")


def make_parser() -> Parser:
    """Return the parser, with the defaults of a model that is not in a run's folder."""
    parser = Parser(prog="g2po evaluate", usage=HELP.partition("\n")[0].removeprefix("usage: "), short_help=HELP)
    add = parser.add_argument
    add("--config", metavar="FILE", type=Path, help="YAML file with these options, or agents/NAME; flags override it")
    add("--output", metavar="FOLDER", type=Path, help="default: evaluations/<environment>-<agent>-<model>")
    add("--overwrite", action="store_true", help="delete the earlier evaluation in the output folder")
    add("--seeds", metavar="N", type=int, default=1, help="number of seeds; seeds 0 … N-1 are played; default: 1")
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="NAME", help="a folder, a Hub id, or the name of a served model")
    of_run = "folder of the training run whose settings are the defaults; default: the model's"
    add("--run", metavar="FOLDER", type=Path, help=of_run)
    engine = "loads the model in this process; default: transformers"
    add("--engine", choices=("transformers", "vllm"), default="transformers", help=engine)
    add("--engine-options", metavar="JSON", type=json_object, default={}, help="passed to the model's constructor")
    add("--base-url", metavar="URL", help="URL of a server with OpenAI's protocol, up to /v1")
    key = "environment variable with the server's key; default: OPENAI_API_KEY"
    add("--key-variable", metavar="NAME", default="OPENAI_API_KEY", help=key)
    add("--parallel", metavar="N", type=int, default=16, help="concurrent requests; default: 16")
    add = parser.add_argument_group("tasks").add_argument
    add("--environment", metavar="NAME", help=f"{', '.join(ENVIRONMENTS)}, or module:Class; default: the run's")
    add("--environment-options", metavar="JSON", type=json_object, default={}, help="arguments of module:Class")
    add("--panel", metavar="NAME", help="evaluation set of the environment or of the run; default: the only one")
    add("--panel-options", metavar="JSON", type=json_object, default={}, help="passed to the environment's load_panel")
    add("--tasks", metavar="FILE", type=Path, help="for module:Class: a file with one task per line, as JSON")
    add("--limit", metavar="N", type=int, help="evaluate only the first N tasks")
    add = parser.add_argument_group("agent").add_argument
    agent = f"{', '.join(AGENTS)}: how the model is prompted; or an agent of your own, FILE.py[:NAME] or module:NAME; "
    add("--agent", metavar="NAME", default="direct", help=f"{agent}default: direct, as trained")
    add("--trials", metavar="N", type=int, default=3, help="trials per task (reflexion only); default: 3")
    add("--prompt", metavar="NAME", help="module:TEMPLATE, a PromptTemplate; default: the run's, or the panel's")
    add("--chat-template-kwargs", metavar="JSON", type=json_object, default={}, help="passed to the chat template")
    history = "window: the last steps; conversation: all, in turns; default: the run's, else the trainer's"
    add("--history", choices=HISTORIES, help=history)
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
    more = 'further options of the engine, e.g. {"presence_penalty": 0.5} (vLLM); default: the run\'s'
    add("--generation-kwargs", metavar="JSON", type=json_object, default={}, help=more)
    add = parser.add_argument_group("limits and workers").add_argument
    add("--batch-size", metavar="N", type=int, default=32, help="concurrent episodes; default: 32")
    budget = "token budget: stop before the next turn once prompt + completion tokens reach this"
    add("--max-total-tokens", metavar="N", type=int, help=budget)
    share = "exit code 1 above this fraction of environment errors; default: 0.1"
    add("--max-error-rate", metavar="X", type=float, default=0.1, help=share)
    add("--num-environment-workers", metavar="N", type=int, help="default: one per core")
    seconds = {"metavar": "S", "type": float}
    add("--environment-reset-timeout", **seconds, default=120.0, help="maximum seconds of a reset; default: 120")
    add("--environment-step-timeout", **seconds, default=60.0, help="maximum seconds of a step; default: 60")
    load = "maximum seconds to import the environment; default: as a reset, at least 60"
    add("--environment-load-timeout", **seconds, help=load)
    whole = "maximum seconds of all resets and steps of an episode; default: none"
    add("--environment-episode-timeout", **seconds, help=whole)
    add("--environment-worker-resets", metavar="N", type=int, help="replace a worker after this many resets")
    memory = "replace a worker that takes more memory, in MiB"
    add("--environment-worker-memory-mb", metavar="N", type=float, help=memory)
    passed = "pass these variables to the environment although they look like secrets"
    add("--environment-variables", metavar="NAME", nargs="*", default=[], help=passed)
    parser.set_defaults(trained_history_length=None, trained_dtype=None, trained_autocast=None)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments: flags, then `--config`, then the settings of the model's run, then the defaults."""
    parser = make_parser()
    given = _read_options(parser, parser.parse_known_args(argv)[0].config)
    parser.set_defaults(**{name: value for name, value in given.items() if name not in ("stop", "stop_after")})
    first, _ = parser.parse_known_args(argv)
    if first.model is None:
        parser.error("--model is missing")
    folder = find_run(first.run or first.model) if first.run or not first.base_url else None
    if first.run and not folder:
        parser.error(f"run is {str(first.run)!r}: there is no run.json, which the trainer writes into its output_dir")
    try:
        first.own_agent = _own_agent(first)
        if first.environment is not None:
            first.environment = resolve_environment_name(first.environment)
        run = read_run(folder) if folder else {}
        defaults = run_defaults(run, folder, first) if folder else {}
    except ValueError as error:
        parser.error(str(error))
    merged = {**defaults, **given}
    options = {**defaults.get("panel_options", {}), **given.get("panel_options", {})}
    # As defaults, argparse would append to lists and replace dictionaries.
    lists = {name: merged.pop(name, []) for name in ("stop", "stop_after")}
    parser.set_defaults(**{**merged, "panel_options": options})
    args = parser.parse_args(argv)
    args.environment, args.own_agent = first.environment or args.environment, first.own_agent
    _set_agent(parser, args)
    source = name_of_agent(args.environment_options) if args.environment == AGENT_ENVIRONMENT else args.environment
    if source and args.tasks is None and ".py:" in source:
        beside = Path(source.rpartition(":")[0]).with_name("tasks.jsonl")  # as for `g2po check` and `train`
        args.tasks = beside if beside.is_file() else None
    args.panel_options = {**options, **args.panel_options}
    for name, default in lists.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.run_folder, args.run_defaults = folder if defaults else None, defaults
    _check(parser, args)
    if args.output is None:
        name = f"{played_name(args).split(':')[-1]}-{args.agent}-{Path(args.model).name}"
        args.output = Path("evaluations", name)
    return args


def _own_agent(args: argparse.Namespace) -> str | None:
    """Return the full name of the user's own agent, and set `agent`; `None` for a way to prompt the model."""
    name = args.agent
    if name in AGENTS:
        return None
    if ":" not in name and not name.endswith(".py"):
        raise ValueError(
            f"--agent is {name!r}: choose {', '.join(AGENTS)}, or name your own agent, as FILE.py or FILE.py:NAME"
        )
    if args.environment is not None:
        raise ValueError(
            f"--agent is {name!r} and --environment is {args.environment!r}: an agent brings its own environment; "
            "remove one"
        )
    args.agent = "direct"
    return resolve_agent_name(name)


def _set_agent(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Make the user's own agent the environment, and bring the arguments of an agent's environment into one form."""
    options = dict(args.environment_options)
    if args.own_agent is not None:
        args.environment, args.agent = AGENT_ENVIRONMENT, "direct"
        same = same_environment(args.own_agent, name_of_agent(options)) and isinstance(options["agent"], Mapping)
        options["agent"] = {**(options["agent"] if same else {}), "import": args.own_agent}
    if args.environment != AGENT_ENVIRONMENT:
        return
    if args.agent != "direct":
        parser.error(f"--agent is {args.agent}: the run's own agent asks the model, and --agent direct plays it")
    if isinstance(options.get("agent"), str):
        options["agent"] = {"import": options["agent"]}
    if (name := name_of_agent(options)) is None:
        parser.error(
            "the run's agent has no name in run.json (it was a lambda, a local function or an AgentCommand that is no "
            "variable of a module): pass --agent FILE.py:NAME, the agent that was trained"
        )
    turns = options.pop("max_turns", None)
    args.max_turns = turns if args.max_turns is None else args.max_turns
    try:
        check_is_there(name, "agent")
        options["agent"] = {**options["agent"], "import": resolve_agent_name(name)}
    except ValueError as error:
        parser.error(str(error))
    args.environment_options = options


def played_name(args: argparse.Namespace) -> str:
    """Return the name of what is played: the environment's, or the agent's."""
    return name_of_agent(args.environment_options) if args.environment == AGENT_ENVIRONMENT else args.environment


def unknown_environment(name: str) -> ValueError:
    """Return the error for a name that is not an environment."""
    return ValueError(f"environment is {name!r}: choose one of {', '.join(ENVIRONMENTS)}, or module:Class of your own")


def _read_options(parser: argparse.ArgumentParser, path: Path | None) -> dict[str, Any]:
    """Return the options of a YAML file, checked as flags are."""
    try:
        given = {name.replace("-", "_"): value for name, value in read_config(path).items()}
    except ValueError as error:
        parser.error(str(error))
    known = {action.dest: action for action in parser._actions}
    if unknown := sorted(set(given) - set(known)):
        parser.error(f"{path}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    for name, value in given.items():
        action = known[name]
        if action.choices and value not in action.choices:
            parser.error(f"{path}: {name} is {value!r}: choose one of {', '.join(action.choices)}")
        kinds, what = _kinds_of(action)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool)):
            parser.error(f"{path}: {name} is {value!r}: write {what}")
    return given


def _kinds_of(action: argparse.Action) -> tuple[Any, str]:
    """Return the types of an option's value in a YAML file, and what to write."""
    if action.nargs == 0:
        return bool, "true or false"
    if action.nargs == "*" or isinstance(action, argparse._AppendAction):
        return list, "a list"
    kinds = {int: (int, "a whole number"), float: ((int, float), "a number"), json_object: (Mapping, "name: value")}
    return kinds.get(action.type, (str, "a text"))


_AT_LEAST_1 = (
    *("seeds", "batch_size", "trials", "max_tokens", "parallel", "limit", "max_turns", "max_prompt_length"),
    "max_total_tokens",
)
# Option -> whether its value, if not `None`, is valid; and the remedy.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: (lambda value: value >= 1, "set it to at least 1") for name in _AT_LEAST_1},
    "temperature": (lambda value: 0 <= value < math.inf, "set it to at least 0 (greedy)"),
    "top_p": (lambda value: 0 < value <= 1, "set it above 0 and at most 1 (off)"),
    "top_k": (lambda value: value >= 0, "set it to 0 (off) or more"),
    "min_p": (lambda value: 0 <= value <= 1, "set it between 0 (off) and 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "set it above 0 (1 is off)"),
    "history_length": (lambda value: value >= 0, "set it to at least 0"),
    "max_error_rate": (lambda value: 0 <= value <= 1, "set it between 0 and 1"),
}


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.environment is None:
        found = "has no run.json that names one" if Path(args.model).is_dir() else "is not the folder of a run"
        parser.error(f"--environment is missing: {args.model} {found}")
    for name in [action.dest for action in parser._actions]:
        for place in masked_names(getattr(args, name, None), name):
            parser.error(
                f"{place} was left out of {FILE}, since it looks like a secret: give --{name.replace('_', '-')} with "
                "it, or let the environment read it from a variable, passed by --environment-variables"
            )
    if args.base_url and not args.base_url.startswith(("http://", "https://")):
        parser.error(f"--base-url is {args.base_url!r}: write an address, as http://127.0.0.1:8000/v1")
    for name, (is_valid, remedy) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not is_valid(value):
            parser.error(f"--{name.replace('_', '-')} is {value}: {remedy}")
    if not all((*args.stop, *args.stop_after)):
        parser.error("--stop or --stop-after is an empty text: name a text that ends completions")
    if (reserved := reserved_option(args.generation_kwargs)) is not None:
        name, setting = reserved
        parser.error(f"--generation-kwargs has {name}: {_FLAGS[setting]}")
    if args.agent != "direct" and args.history is not None:
        parser.error(f"--history is {args.history}: --agent {args.agent} has prompts of its own; remove one of them")
    if args.agent != "direct" and args.prompt is not None:
        parser.error(f"--prompt is {args.prompt!r}: --agent {args.agent} has prompts of its own; remove one of them")
    if args.base_url and args.engine_options:
        parser.error(f"--engine-options is {args.engine_options}: a server (--base-url) does not take them; remove it")
    if args.environment in ENVIRONMENTS:
        for name in ("tasks", "environment_options"):
            if value := getattr(args, name):
                flag = name.replace("_", "-")
                parser.error(f"--{flag} is {value}: {args.environment} takes --panel and --panel-options instead")


# Setting -> what to pass instead of the entry of --generation-kwargs that sets it.
_FLAGS = {
    **{name: f"pass --{name.replace('_', '-')} instead" for name in ("temperature", "top_p", "top_k", "min_p")},
    "repetition_penalty": "pass --repetition-penalty instead",
    "max_tokens": "pass --max-tokens instead",
    "stop_sequences": "pass --stop or --stop-after instead",
    "seed": "pass --seeds instead",
    "end tokens": "the model's generation_config and tokenizer name the tokens that end a completion; remove it",
    "number of completions": "a prompt gets one completion; remove it",
}
