"""Play every task of an evaluation set once per seed, and print success and other rates: mean ± std over seeds.

    g2po evaluate --model runs/alfworld-tiny --seeds 3
    g2po evaluate --model Qwen/Qwen2.5-7B-Instruct --engine vllm --environment webshop --agent react
    g2po evaluate --model gpt-4o --base-url https://api.openai.com/v1 --environment alfworld \\
        --panel valid_unseen --config agents/react
    g2po evaluate --model MODEL --environment my_game.py:MyGame --tasks tasks.jsonl
    g2po evaluate --model MODEL --agent my_agent.py --tasks tasks.jsonl

A model in the folder of a training run is evaluated with the run's settings, unless options override them. The same
command resumes an evaluation that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from shlex import quote
from typing import Any

from ...evaluation.options import EvaluateOptions, describe_settings, run_settings
from ...runs.ownership import held
from ...utils.options import require
from ...utils.show import printable
from ..parser import parse
from ..recipe_files import check_files_and_packages, check_model, config_keys


def read(argv: Sequence[str] | None = None) -> tuple[EvaluateOptions, dict[str, Any]]:
    """Return the options, and those from the model's run. Flags override `--config`, which overrides the run."""
    of_run: dict[str, Any] = {}

    def settings(given: dict[str, Any]) -> dict[str, Any]:
        of_run.update(run_settings(given))
        for name in {"environment_options", "panel_options"} & given.keys():  # those that are not given stay the run's
            given[name] = {**of_run.get(name, {}), **given[name]}
        return of_run

    sources = {"config": partial(config_keys, None, "agents"), "defaults": settings}
    options, _ = parse((EvaluateOptions,), argv, command="g2po evaluate", description=__doc__, **sources)
    return options, of_run


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate. Raises `G2POError` if too many episodes ended in an environment error."""
    options, of_run = read(argv)
    if not options.base_url:
        check_model("model", options.model, "tokenizer" not in options.engine_options, **options.engine_options)
        check_files_and_packages({"engine": options.engine})
    from ...evaluation.evaluate import evaluate, format_rows  # torch, which is slow to import

    if (line := describe_settings(options, of_run)) is not None:
        print(line, flush=True)
    try:
        with held(options.output, "output"):
            results = evaluate(options)
    except KeyboardInterrupt:
        print(f"\nStopped. The same command resumes here: {options.output}", file=sys.stderr)
        raise SystemExit(130) from None
    print(format_rows(results["seeds"]))
    tasks = results["settings"]["tasks"].split()[0]
    for seed, reasons in enumerate(results["failure_reasons"]):
        for reason, number in reasons.items():
            print(f"seed {seed}: {number} of {tasks} episodes failed: {printable(reason)}")
    print(f"Trajectories and results are in {options.output}\nNext: g2po view {quote(str(options.output))}")
    share = max(row["errors"] for row in results["seeds"]) / 100
    first = f"{share:.0%} of the episodes ended in an environment error, the same command plays them again. The first:"
    is_valid = share <= options.max_error_rate
    require(is_valid, "max_error_rate", options.max_error_rate, f"{first}\n{results['first_error']}")
