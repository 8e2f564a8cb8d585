"""Estimate what a training needs: memory by part, tokens, seconds and cost.

    usage: g2po estimate TARGET [--config FILE|NAME] [--FIELD VALUE ...]     as for `g2po train`
        [--gpu NAME] [--price X] [--like RUN] [--turns X] [--prompt_tokens X] [--completion_tokens X]
        [--measure N]

Loads no weights and trains nothing, unless --measure is given.

--gpu NAME              h200, h100, a100-80gb, a100-40gb, l40s, a10g, l4, rtx4090. Default: h100 if the configuration
                        computes in bfloat16, otherwise none: then only memory is estimated
--price X               price of one GPU per hour, in any currency
--like RUN              take turns, tokens and shared prefixes of episodes from this run
--turns X  --prompt_tokens X  --completion_tokens X
                        mean turns of an episode, and mean tokens of a step. Default: two thirds of max_turns, and at
                        most 700 and 150
--measure N             train N iterations on this machine, in a temporary folder, and use their seconds and episodes;
                        N is at least 2, because the first iteration warms up
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...estimate.measured import MeasuredRun, read_measured
from ...estimate.plan import Episodes, Plan
from ...estimate.report import format_measured, format_plan
from ...estimate.seconds import GPUS
from ...utils.parser import take_options
from ..preflight import recipe_settings
from ..recipe_files import bundled_model, recipes_folder
from .train import read, resolve

_OWN = ("gpu", "price", "like", "turns", "prompt_tokens", "completion_tokens", "measure")
# Of a measurement: nothing is kept, and the evaluation after training is the only one.
_MEASURING = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": "false",
    "push_to_hub": "false",
    "report_to": "none",
    "eval_before": "false",
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__.split("\n", 2)[2].strip())
        return
    try:
        own, words = take_options(argv, _OWN)
        numbers = {name: _as_number(name, own[name]) for name in own if name not in ("gpu", "like")}
        request = read(words)
        script, arguments = resolve(request)
        if script.parent != recipes_folder():
            raise ValueError(
                f"{request.target} is a script, whose settings cannot be read: pass an environment's file"
            )
        settings = recipe_settings(script, arguments)
        if settings["model_name_or_path"] is None and (bundled := bundled_model(request.target)):
            settings["model_name_or_path"] = bundled
        plan = Plan.from_settings(settings, int(request.processes or 1), _is_sharded(request.accelerate))
        gpu = own.get("gpu", "h100" if plan.uses_bfloat16 else None)
        if gpu is not None and gpu not in GPUS:
            raise ValueError(f"gpu is {gpu!r}: choose one of {', '.join(GPUS)}")
        _check_together(own, numbers, gpu)
        episodes = _episodes(plan, own.get("like"), numbers)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if "measure" in numbers:
        measured = measure(script, words, plan, int(numbers["measure"]))
        print(format_measured(plan, measured, numbers.get("price")))
    else:
        try:
            print(format_plan(plan, episodes, GPUS.get(gpu), numbers.get("price")))
        except ValueError as error:
            raise SystemExit(str(error)) from error


def _as_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: set it to a number") from None
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} is {text}: set it above 0")
    return number


def _check_together(own: Mapping[str, str], numbers: Mapping[str, float], gpu: str | None) -> None:
    """Refuse options that have no effect together."""
    if "measure" in own:
        if numbers["measure"] < 2 or numbers["measure"] % 1:
            raise ValueError(
                f"measure is {own['measure']}: set it to a whole number of at least 2, the first iteration warms up"
            )
        if ignored := set(own) - {"measure", "price"}:
            name = sorted(ignored)[0]
            raise ValueError(f"{name} is {own[name]!r} and measure is given, which measures it: leave one of them out")
    elif "price" in own and gpu is None:
        raise ValueError(f"price is {own['price']}, and without a GPU no seconds are computed: add --gpu NAME")


def _is_sharded(accelerate: str | None) -> bool:
    return any(name in (accelerate or "") for name in ("fsdp", "zero3"))


def _episodes(plan: Plan, like: str | None, numbers: Mapping[str, float]) -> Episodes:
    given = {name: numbers[name] for name in ("turns", "prompt_tokens", "completion_tokens") if name in numbers}
    if like is None:
        return plan.assumed_episodes(**given)
    if given:
        raise ValueError(f"like is {like!r} and {next(iter(given))} is given: remove one of them")
    return read_measured(Path(like)).episodes


def measure(script: Path, words: Sequence[str], plan: Plan, iterations: int) -> MeasuredRun:
    """Train some iterations of `g2po train *words` in a temporary folder, and return what they took."""
    fields = plan.settings
    with tempfile.TemporaryDirectory(prefix="g2po-estimate-") as folder:
        options: dict[str, Any] = {name: value for name, value in _MEASURING.items() if name in fields}
        options |= {"max_steps": iterations * plan.steps_per_iteration, "output_dir": folder, "overwrite": "true"}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        started = time.perf_counter()
        print(f"Training {iterations} iterations in {folder}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", "g2po_trl", "train", *words, *flags], stdout=sys.stderr)
        if done.returncode:
            raise SystemExit(f"the training ended with exit code {done.returncode}")
        return read_measured(
            Path(folder),
            wall=time.perf_counter() - started,
            peak_memory=1024.0 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        )
