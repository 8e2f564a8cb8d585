"""`g2po evaluate`: check the arguments in less than a second, then import torch and evaluate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ...environments.tasks import read_tasks
from ...utils.extras import install_command
from ...utils.parser import take_options
from ..preflight import check_model
from ..recipe_files import find_config


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; `--config` also takes the name of a bundled configuration, e.g. agents/react."""
    from ...evaluation.arguments import ENVIRONMENTS, parse, unknown_environment

    try:
        options, argv = take_options(sys.argv[1:] if argv is None else argv, ("config",))
        if options:
            argv += ["--config", str(find_config(options["config"], kind="", among="agents"))]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    args = parse(argv)
    try:
        if args.tasks is not None:
            read_tasks(args.tasks)
        if ":" not in args.environment and args.environment not in ENVIRONMENTS:
            raise unknown_environment(args.environment)
        if not args.base_url:
            check_model("model", args.model)
        if args.engine == "vllm" and not args.base_url and find_spec("vllm") is None:
            raise ValueError(f"engine is vllm: it is not installed: {install_command('vllm')}")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    from ...evaluation.evaluate import main as evaluate

    evaluate(argv)
