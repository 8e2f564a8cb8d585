"""`g2po evaluate`: check the arguments in less than a second, then import torch and evaluate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ...environments.tasks import read_tasks
from ...utils.extras import install_command
from ..preflight import check_model
from ..recipe_files import find_config


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; `--config` also takes the name of a bundled configuration, e.g. agents/react."""
    from ...evaluation.arguments import ENVIRONMENTS, parse, unknown_environment

    argv = list(sys.argv[1:] if argv is None else argv)
    for at, word in enumerate(argv):
        name = word.removeprefix("--config=") if word.startswith("--config=") else None
        if at and argv[at - 1] == "--config":
            name = word
        if name is not None:
            try:
                argv[at] = word[: len(word) - len(name)] + str(find_config(name, kind="", among="agents"))
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
