"""Evaluate a model on an evaluation set: play its tasks once per seed, resume, and write a table."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import xxhash

from ..engines.registry import ENGINES
from ..engines.sampling import derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.loading import load_template
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.setup import first_steps, played_as
from ..environments.several import check_limits, environments_of, mixed, one_task_each
from ..environments.tasks import check_task_columns, read_tasks
from ..environments.validation import is_score
from ..rollout.actor import PromptActor
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..runs.callbacks import rollout_bar
from ..runs.metrics import summarize
from ..runs.run_json import by_names, describe_prompt, installed_versions, load_object, load_prompt
from ..trajectory import Trajectory, read_unfinished, write_jsonl
from ..utils.json import to_json, write_json, write_json_lines
from ..utils.masking import masked
from ..utils.options import check_options, require
from .chat_models import ServerActor, ServerChat
from .checkpoints import weights_hash
from .options import EvaluateOptions
from .panel import Panel
from .react import OBSERVED, react_template


def load_panel(options: EvaluateOptions) -> tuple[Panel, EpisodeLimits]:
    """Return the evaluation set that the options name, as it is played, and the limits of its episodes."""
    if ":" in options.environment:
        remedy = f"pass --tasks, a file with one row of {options.played} per line"
        require(options.tasks is not None, "tasks", None, remedy)
        factory = mixed(load_object({"import": options.environment, "kwargs": options.environment_options}))
        make, arguments = Panel, [options.panel or options.played, read_tasks(options.tasks), factory]
    else:
        make = importlib.import_module(f"g2po_envs.{options.environment}.panels").load_panel
        arguments = [options.panel] if options.panel else []
    parameters = inspect.signature(make).parameters.values()
    defaults = {one.name: one.default for one in [*parameters][len(arguments) :]}
    check_options("panel_options", options.panel_options, defaults, "the panel")
    panel = make(*arguments, **options.panel_options)
    rows, template, prompt = panel.rows[: options.limit], panel.prompt_template, options.prompt
    require(bool(rows), "tasks", [], f"there is nothing to evaluate in {panel.name}")
    if prompt is not None:  # a name, or what a run.json has
        template = load_template(prompt) if isinstance(prompt, str) else load_prompt(prompt)
    history = options.history if options.agent == "direct" else panel.history
    limits = EpisodeLimits.of(options, max_turns=options.max_turns or panel.max_turns)
    check_limits(limits, panel.environment_factory)
    factory, template, history = played_as(panel.environment_factory, limits, template, history)
    for number, row in enumerate(rows, 1):
        check_task_columns(factory, row, f"task {number} of {panel.name}: ")
    if options.agent != "direct":
        template = react_template(panel, lists_actions="{actions}" in template.later)
        history = "conversation"
    columns = {name: f"success_rate_by_type/{name}" for name in environments_of(panel.environment_factory)}
    length = panel.history_length if options.history_length is None else options.history_length
    prompts = {"prompt_template": template, "history": history, "history_length": length}
    played = {"environment_factory": factory, "max_turns": limits.max_turns, **prompts}
    return replace(panel, rows=rows, columns={**panel.columns, **columns}, **played), limits


def make_actor(options: EvaluateOptions, panel: Panel) -> PromptActor | ServerActor:
    """Return the model that the options name, with the prompts of the evaluation set."""
    more = {"chat_template_kwargs": options.chat_template_kwargs, "generation_kwargs": options.generation_kwargs}
    if options.base_url:
        server = ServerChat(options.base_url, options.model, options.key_variable, options.parallel, **more)
        actor = ServerActor(server, stop=() if options.agent == "direct" else (OBSERVED,))
    else:
        more |= {**options.precision, **options.engine_options}
        actor = ENGINES[options.engine].load_offline(options.model, **more)
    lengths = {"history_length": panel.history_length, "max_prompt_length": options.max_prompt_length}
    return replace(actor, template=panel.prompt_template, history=panel.history, **lengths)


def play_panel(panel: Panel, player: Player, options: EvaluateOptions, seed: int, path: Path) -> list[Trajectory]:
    """Return the episode of each task with a seed, in order.

    Each is appended to a file when it ends, with `panel_index` and tokens in its `info`. Playing into the same file
    again resumes: finished episodes are kept, and environment errors are played again. If a completion depends on the
    rest of its batch, batches are repeated as a whole.
    """
    indices, size = range(len(panel.rows)), options.batch_size
    batches = [indices[start : start + size] for start in indices[::size]]
    is_independent = getattr(player.actor.engine, "takes_seeds", True)  # a server takes them, too
    finished = _resume(path, () if is_independent else batches)

    def record(episode: Episode) -> None:
        index, trajectory = left[episode.number], episode.trajectory()
        tokens = dict(zip(("prompt_tokens", "completion_tokens"), map(sum, zip((0, 0), *episode.usage))))
        trajectory.info = {**trajectory.info, "panel_index": index, **tokens}
        for step in trajectory.steps:
            if step.prompt_ids and step.messages is None:  # the folder has no tokenizer for the viewer
                step.prompt = player.actor.encode.tokenizer.decode(step.prompt_ids)
        write_jsonl(path, [trajectory], append=True)
        finished[index] = trajectory

    for batch in batches:
        if left := [index for index in batch if index not in finished]:
            seeds = [derived_seed(seed, index) for index in left]  # as in a training run with `eval_seed`
            with rollout_bar(f"seed {seed}", player.max_turns, enabled=True) as bar:
                player.play([panel.rows[index] for index in left], options.sampling, None, seeds, bar, record)
    return [finished[index] for index in indices]


def _resume(path: Path, batches: Sequence[Sequence[int]]) -> dict[int, Trajectory]:
    """Return a file's episodes by task; remove errors, interrupted episodes and unfinished `batches` from it."""
    if not path.exists():
        return {}
    played = [*filter(None, read_unfinished(path))]
    finished = {t.info["panel_index"]: t for t in played if t.counted}
    for index in {index for batch in batches if not finished.keys() >= set(batch) for index in batch}:
        finished.pop(index, None)
    write_jsonl(path, [trajectory for trajectory in played if trajectory.info["panel_index"] in finished])
    return finished


def seed_row(panel: Panel, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the row of a seed: the set's columns in percent, then turns, tokens per episode, and errors."""
    summary = summarize(trajectories, [row.get("task_type") for row in panel.rows])
    row = {}
    has_results = any(t.counted for t in trajectories)
    for heading, name in panel.columns.items():
        part, _, kind = name.partition("/")
        none = 0.0 if is_score(part) and has_results else nan  # no episode has a score, e.g. none bought anything
        row[heading] = 100 * (summary[part].get(kind, nan) if kind else summary.get(part, none))
    tokens = mean(t.info["prompt_tokens"] + t.info["completion_tokens"] for t in trajectories)
    row |= {"turns": summary["turns"], "tokens": tokens or nan}  # not every server reports them
    ratios = {"valid": "valid_action_ratio", "admissible": "admissible_action_ratio"}
    row |= {heading: 100 * summary[name] for heading, name in ratios.items() if name in summary}
    return row | {"errors": 100 * (summary["error_rate"] + summary["lost_rate"])}


def format_rows(rows: Sequence[dict[str, float]]) -> str:
    """Return a table of means, ± sample standard deviations of three or more seeds; n/a where one lacks a number."""
    cells = {}
    for heading in dict.fromkeys(heading for row in rows for heading in row):
        values, digits = [row.get(heading, nan) for row in rows], 0 if heading == "tokens" else 1
        is_known = not any(map(isnan, values))
        varies = is_known and len(values) >= 3 and len(set(values)) > 1
        spread = f" ± {stdev(values):.{digits}f}" if varies else ""
        cells[heading] = f"{mean(values):.{digits}f}{spread}" if is_known else "n/a"
    widths = [max(len(heading), len(cell)) + 2 for heading, cell in cells.items()]
    return "\n".join("".join(map(str.rjust, part, widths)) for part in (cells, cells.values()))


def identity(options: EvaluateOptions, panel: Panel) -> dict[str, Any]:
    """Return all settings that the numbers depend on. Only an evaluation with equal settings is resumed."""
    settings = {one.name: getattr(options, one.name) for one in fields(options) if not one.metadata["resumable"]}
    if options.base_url is None:
        settings["weights"] = weights_hash(options.model, options.engine_options.get("revision"))
    settings |= {
        "panel": panel.name,
        "panel_data": panel.data,
        "tasks": f"{len(panel.rows)} ({_hash(list(panel.rows))})",
        "prompt": _hash(by_names(describe_prompt(panel.prompt_template))),
        **{name: getattr(panel, name) for name in ("history", "history_length", "max_turns")},
        "versions": installed_versions(),
    }
    return json.loads(to_json(masked(by_names(settings))))


def _hash(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(to_json(data, sort_keys=True).encode())


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Play the evaluation set and return the results, which are also written to OUTPUT/results.json.

    Raises:
        G2POError: for invalid settings, if OUTPUT contains an evaluation with other settings, or if a server rejects
            requests or cannot be reached.
    """
    (panel, limits), output = load_panel(options), options.output
    settings = identity(options, panel)
    _check_output(output, settings, options.overwrite)
    pool = EnvironmentPool(panel.environment_factory, PoolLimits.of(options))
    with pool, closing(make_actor(options, panel)) as actor:  # one that cannot be loaded deletes nothing
        if options.agent != "direct":
            starts, _ = first_steps(pool, one_task_each(panel.environment_factory, panel.rows))
            sends = any(getattr(start, "request", None) for start in starts)
            remedy = "the environment sends chat requests, which are prompts already; pass --agent direct"
            require(not sends, "agent", options.agent, remedy)
        if options.overwrite:
            shutil.rmtree(output / "trajectories", ignore_errors=True)
            (output / "results.json").unlink(missing_ok=True)
        write_json(output / "settings.json", settings, indent=1)
        write_json_lines(output / "panels" / "panel.jsonl", panel.rows)  # the viewer reads kinds of tasks there
        print(f"{panel.name}, {len(panel.rows)} tasks: {options.agent} agent, {options.model}", flush=True)
        player = Player(pool, actor, limits)
        files = [output / "trajectories" / f"{options.agent}-{seed}.jsonl" for seed in range(options.seeds)]
        played = [play_panel(panel, player, options, seed, file) for seed, file in enumerate(files)]
    results = {
        "model": options.model,
        "settings": settings,
        "seeds": [seed_row(panel, trajectories) for trajectories in played],
        "failure_reasons": [summarize(trajectories)["failure_reasons"] for trajectories in played],
    }
    write_json(output / "results.json", results, indent=1)
    errors = (t.error for trajectories in played for t in trajectories if not t.counted)
    return {**results, "first_error": next(errors, None)}


def _check_output(output: Path, settings: Mapping[str, Any], overwrite: bool) -> None:
    """Refuse a folder with other files, or with episodes of other settings, which must not be mixed."""
    file, has_episodes = output / "settings.json", any(output.glob("trajectories/*.jsonl"))
    is_own = not (output / "run.json").is_file() and (file.is_file() or not has_episodes)
    require(is_own, "output", str(output), "it holds what no evaluation wrote; pass another --output")
    before = json.loads(file.read_text(encoding="utf-8")) if has_episodes and not overwrite else settings
    both = {name: (before.get(name), settings.get(name)) for name in {**before, **settings}}
    changed = {name: values for name, values in both.items() if values[0] != values[1]}
    remedy = f"{output} holds an evaluation with the first values; pass another --output, or --overwrite to delete it"
    require(not changed, "output", changed, remedy)
