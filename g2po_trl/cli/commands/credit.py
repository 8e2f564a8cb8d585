"""Credit the calls of logged runs: which call of an agent made an episode better or worse?

    g2po credit FILE.jsonl
    g2po credit FILE.jsonl --estimator grpo --output FOLDER
    g2po credit FILE.jsonl --state-key keys.py:page      # def page(messages): the key of a request
    g2po credit FILE.jsonl --state-key similar:0.9       # merges keys that share 90 % of their word pairs

Each line of FILE (or element, of a JSON array) is an episode, as {"task_id", "reward", "messages"} or {"task_id",
"reward", "calls": [{"messages", "response"}, ...]}, or a call, as {"task_id", "episode_id", "messages", "response"}
with the reward on one line of the episode. Episodes of one task are compared. Messages, items ("input", "output") and
responses are as in OpenAI's chat completions and Responses and in Anthropic's Messages. Parts of
unknown kinds are skipped and counted.

Writes FOLDER/credit.jsonl, one line for each call, and trajectories for `g2po view FOLDER` and `g2po report FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...credit.estimators.registry import ESTIMATORS, compares_steps, estimator_name, make_estimator
from ...credit.state_keys import merge_similar_keys, similarity_threshold
from ...environments.loading import load
from ...logs.credit import counts, credit_traces, extremes, rows, states
from ...logs.traces import Traces, trajectories_of_file
from ...trajectory import write_jsonl
from ...utils.errors import G2POError
from ...utils.json import write_json, write_json_lines
from ...utils.options import option, require
from ...utils.show import printable
from ..parser import parse

TRAJECTORIES = Path("trajectories", "train-000001.jsonl")


@dataclass
class Options:
    file: Path = option("the log", positional=True, metavar="FILE")
    estimator: str = option("estimator of the advantages", "g2po", choices=tuple(ESTIMATORS))
    estimator_kwargs: dict[str, Any] = option("options of the estimator", {})
    gamma: float = option("discount per call", 0.95)
    state_key: str | None = option("of messages; default: those since the last completion", None, metavar="NAME")
    output: Path | None = option("where to write; default: FILE-credit, without its suffix", None, metavar="FOLDER")

    def __post_init__(self):
        self.output = self.output or self.file.with_name(f"{self.file.stem}-credit")


def main(argv: Sequence[str] | None = None) -> None:
    options, _ = parse((Options,), argv, command="g2po credit", description=__doc__)
    name, kwargs, gamma, output = options.estimator, options.estimator_kwargs, options.gamma, options.output
    estimator = make_estimator(name, kwargs)
    if (output / "run.json").exists() or (output / "trajectories").exists():
        from ...runs.ownership import read_description  # needs more than numpy

        remedy = "it holds another run, pass another --output FOLDER"
        require("traces" in read_description(output, "run.json"), "output", str(output), remedy)
    traces = _read(options.file, options.state_key)
    graph = credit_traces(traces, estimator, gamma)
    settings = {"advantage_estimator": name, "estimator_name": estimator_name(name, kwargs)}
    settings |= {"estimator_kwargs": kwargs or None, "gamma": gamma}
    source = {"file": str(options.file), "state_key": options.state_key}
    write_json(output / "run.json", {"traces": source, "estimator": settings}, indent=1)
    write_jsonl(output / TRAJECTORIES, traces.trajectories)
    write_json_lines(output / "credit.jsonl", rows(traces, graph))
    print(printable(f"{options.file}: {counts(traces)}\n\n{settings['estimator_name']}, gamma {gamma:g}\n"))
    print(printable(f"{extremes(traces, graph)}\n\n{states(traces, compares_steps(name, kwargs))}\n"))
    print(f"{output}: credit.jsonl, {TRAJECTORIES}, run.json")
    print(f"g2po view {output}      its state graphs\ng2po report {output}    a test of the state keys")


def _read(file: Path, state_key: str | None) -> Traces:
    require(file.is_file(), "file", str(file), "there is no such file")
    is_similar = (state_key or "").startswith("similar")
    threshold = similarity_threshold(state_key) if is_similar else None
    function = load(state_key) if ":" in (state_key or "") and not is_similar else None
    is_known = state_key is None or is_similar or callable(function)
    require(is_known, "state_key", state_key, "write file.py:function, module:function or similar:0.9")
    try:
        traces = trajectories_of_file(file, function)
    except ValueError as error:
        raise G2POError(f"{file}, {error}", getattr(error, "field", None)) from error
    if threshold is not None:
        groups = [trajectory.group for trajectory in traces.trajectories]
        merge_similar_keys(traces.trajectories, groups, threshold)
    return traces
