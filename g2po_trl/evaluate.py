"""Evaluate anything: a checkpoint, an adapter, vLLM or a server, by any agent, on any environment.

    python -m g2po_trl.evaluate --model runs/alfworld-tiny --environment alfworld --panel tiny
    python -m g2po_trl.evaluate --model Qwen/Qwen2.5-7B-Instruct --engine vllm --environment webshop --agent react
    python -m g2po_trl.evaluate --model gpt-4o --base-url https://api.openai.com/v1 --environment alfworld \
        --panel valid_unseen --agent reflexion --config recipes/agents/reflexion.yaml --max-total-tokens 2000000
    python -m g2po_trl.evaluate --model MODEL --environment my_game.py:MyGame --tasks tasks.jsonl

Plays every task of the panel once for each seed and prints the row of the paper's table, mean and standard deviation
over seeds. OUTPUT gets every trajectory, settings and results; the same command again goes on where it was stopped.
A server's key is taken from the environment variable OPENAI_API_KEY (`--key-variable`) and from nowhere else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from .agents import ChatModel, ChatSettings, DirectAgent, PanelPlayer, ReActAgent, ReflexionAgent, TokenBudget
from .agents.chat import LocalChat, ServerChat, TokenBudgetSpentError, VLLMChat
from .check import load
from .environment_pool import EnvironmentPool
from .evaluation import summarize
from .tasks import Panel, tasks_hash
from .trajectory import Trajectory

AGENTS = ("direct", "react", "reflexion")
ENVIRONMENTS = ("alfworld", "webshop", "appworld")


def load_panel(environment: str, name: str | None, options: dict[str, Any], tasks: Path | None) -> Panel:
    """A panel of one of our environments, or of one's own (`module:Class`) with rows from a file.

    Raises:
        ValueError: when there is no such panel.
    """
    if ":" in environment:
        if tasks is None:
            raise ValueError(f"environment is {environment!r} and tasks is None: give a file with one row a line")
        rows = [json.loads(line) for line in tasks.read_text(encoding="utf-8").splitlines() if line.strip()]
        return Panel(name or environment, rows, load(environment), **options)
    if environment not in ENVIRONMENTS:
        raise ValueError(
            f"environment is {environment!r}: choose one of {', '.join(ENVIRONMENTS)}, or module:Class of your own"
        )
    module = importlib.import_module(f"g2po_envs.{environment}.panels")
    return module.load_panel(*([name] if name else []), **options)


def make_agent(args: argparse.Namespace, panel: Panel):
    """The agent that the arguments ask for."""
    if args.agent == "direct":
        length = panel.history_length if args.history_length is None else args.history_length
        return DirectAgent(panel.prompt_template, length)
    options = {"about": panel.about, "form": panel.action_form}
    options |= {"multiline": panel.multiline, "lower_case": panel.lower_case}
    if args.history_length is not None:
        options["history_length"] = args.history_length
    if args.agent == "react":
        return ReActAgent(**options)
    return ReflexionAgent(**options, trials=args.trials)


def make_chat(args: argparse.Namespace) -> ChatModel:
    """The model that the arguments ask for."""
    if args.base_url:
        return ServerChat(args.base_url, args.model, args.key_variable, args.parallel)
    if args.engine == "vllm":
        return VLLMChat(args.model, **args.engine_options)
    return LocalChat(args.model, args.batch_size, **args.engine_options)


def row_of(panel: Panel, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """One seed's numbers: the panel's columns in percent, then turns, tokens of an episode, errors."""
    kinds = [row.get("task_type") for row in panel.rows]
    summary = summarize(trajectories, kinds)
    row = {}
    for heading, name in panel.columns.items():
        part, _, kind = name.partition("/")
        value = summary[part].get(kind) if kind else summary.get(part)
        row[heading] = float("nan") if value is None else 100 * value
    tokens = [t.info["prompt_tokens"] + t.info["reply_tokens"] for t in trajectories]
    return {
        **row,
        "turns": summary["turns"],
        "tokens": mean(tokens),
        "valid": 100 * summary["valid_action_ratio"],
        "errors": 100 * summary["error_rate"],
    }


def format_rows(rows: Sequence[dict[str, float]]) -> str:
    """Mean ± sample standard deviation over seeds, under their headings."""
    cells = {}
    for heading in rows[0]:
        values = [row[heading] for row in rows]
        digits = 0 if heading == "tokens" else 1
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        cells[heading] = f"{mean(values):.{digits}f}{spread}"
    widths = [max(len(heading), len(cell)) + 2 for heading, cell in cells.items()]
    lines = ("".join(f"{text:>{w}}" for text, w in zip(part, widths)) for part in (cells, cells.values()))
    return "\n".join(lines)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Play, write, and return what is written to OUTPUT/results.json.

    Raises:
        ValueError: for settings that make no sense, or others than those OUTPUT was begun with.
        TokenBudgetSpentError: when the budget is spent.
    """
    panel = load_panel(args.environment, args.panel, args.panel_options, args.tasks)
    if args.limit:
        panel = Panel(**{**vars(panel), "rows": panel.rows[: args.limit]})
    settings = ChatSettings(args.temperature, args.top_p, args.max_tokens, tuple(args.stop))
    agent = make_agent(args, panel)
    about = {
        "model": args.model,
        "served": bool(args.base_url),
        "engine": args.engine,
        "environment": args.environment,
        "panel": panel.name,
        "tasks": f"{len(panel.rows)} ({tasks_hash(panel.rows)})",
        "agent": args.agent,
        "trials": agent.trials,
        "history_length": agent.history_length,
        "max_turns": panel.max_turns,
        "batch_size": args.batch_size,
        **asdict(settings),
    }
    _keep_settings(args.output, about)
    budget, rows = TokenBudget(args.max_total_tokens), []
    chat = make_chat(args)
    print(f"{panel.name}: {len(panel.rows)} tasks; {args.agent} agent, {args.model}, temperature {args.temperature}")
    try:
        with EnvironmentPool(panel.environment_factory, num_workers=args.num_environment_workers) as pool:
            for seed in range(args.seeds):
                path = args.output / "trajectories" / f"{args.agent}-{seed}.jsonl"
                player = PanelPlayer(
                    panel, pool, chat, agent, settings, seed, path, budget, args.batch_size, _Progress(seed)
                )
                rows.append(row_of(panel, player.play()))
    finally:
        chat.close()
    tokens = {"read": budget.read, "written": budget.written}
    results = {"settings": about, "seeds": rows, "tokens_of_this_run": tokens}
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


class _Progress:
    """A line for each turn, on a terminal."""

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, turn: int, live: int) -> None:
        if sys.stderr.isatty():
            print(f"\rseed {self.seed}: turn {turn}, {live} episodes live   ", end="", file=sys.stderr, flush=True)


def _keep_settings(output: Path, about: dict[str, Any]) -> None:
    """An output folder belongs to one evaluation: numbers of two must not mix."""
    path = output / "settings.json"
    about = json.loads(json.dumps(about))
    if path.exists():
        before = json.loads(path.read_text())
        changed = [
            f"{name} {before.get(name)!r} -> {about.get(name)!r}"
            for name in {**before, **about}
            if before.get(name) != about.get(name)
        ]
        if changed:
            raise ValueError(
                f"{output} holds another evaluation ({', '.join(changed)}): give another --output, or delete it"
            )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=1) + "\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m g2po_trl.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=Path, help="YAML with any of these; flags win")
    add("--model", help="a folder, a Hub id, or what the server calls it")
    add("--engine", choices=("transformers", "vllm"), default="transformers", help="for models of this machine")
    add("--engine-options", type=json.loads, default={}, help="JSON, to the model's constructor")
    add("--base-url", help="a server that speaks OpenAI's protocol, up to /v1")
    add("--key-variable", default="OPENAI_API_KEY", help="environment variable with its key")
    add("--parallel", type=int, default=16, help="requests at a time")
    add("--environment", help=f"{', '.join(ENVIRONMENTS)}, or module:Class")
    add("--panel", help="which tasks; default: the environment's first")
    add("--panel-options", type=json.loads, default={}, help="JSON, to the environment's load_panel")
    add("--tasks", type=Path, help="for module:Class: a file with one row a line")
    add("--limit", type=int, help="the first so many tasks")
    add("--agent", choices=AGENTS, default="direct")
    add("--trials", type=int, default=3, help="of reflexion")
    add("--history-length", type=int, help="steps shown; default: the environment's, 30 for conversations")
    add("--temperature", type=float, default=0.4)
    add("--top-p", type=float, default=1.0)
    add("--max-tokens", type=int, default=512, help="of a reply")
    add("--stop", action="append", default=[], help="a reply ends before this; may be repeated")
    add("--seeds", type=int, default=1, help="0, 1, …")
    add("--batch-size", type=int, default=32, help="episodes at a time")
    add("--max-total-tokens", type=int, help="stop before more are read and written together")
    add("--num-environment-workers", type=int, help="default: one a core")
    add("--output", type=Path, help="default: evaluations/<environment>-<agent>-<model>")
    first, _ = parser.parse_known_args(argv)
    if first.config:
        given = yaml.safe_load(first.config.read_text()) or {}
        known = {action.dest for action in parser._actions}
        if unknown := sorted(set(given) - known):
            parser.error(f"{first.config}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        parser.set_defaults(**given)
    args = parser.parse_args(argv)
    for name in ("model", "environment"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is missing")
    for name in ("seeds", "batch_size", "trials", "max_tokens", "parallel"):
        if getattr(args, name) < 1:
            parser.error(f"{name} is {getattr(args, name)}: set it to at least 1")
    if args.temperature < 0:
        parser.error(f"temperature is {args.temperature}: set it to at least 0 (greedy)")
    if args.output is None:
        name = f"{args.environment.split(':')[-1]}-{args.agent}-{Path(args.model).name}"
        args.output = Path("evaluations", name)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        results = evaluate(args)
    except (ValueError, OSError, ImportError, TokenBudgetSpentError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(format_rows(results["seeds"]))
    print(f"Trajectories and results are in {args.output}")


if __name__ == "__main__":
    main()
