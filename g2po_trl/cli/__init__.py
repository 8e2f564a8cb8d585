"""Command line: the commands of `g2po`, and how they report errors.

`main` imports a command's code when the command is called.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module

from ..utils.errors import G2POError
from .parser import nearest
from .process import describe_error, print_error, set_up_process

# Title -> command -> description. The code of a command is `main(argv)` in g2po_trl.cli.commands.NAME.
GROUPS = {
    "Prepare": {
        "init": "write a folder with a small environment or agent to start from",
        "check": "play random episodes of an environment or agent, report problems",
        "estimate": "estimate the memory and tokens of a training run",
    },
    "Train": {
        "teach": "fine-tune a model on an expert's actions, as a start for training",
        "train": "train on alfworld, sokoban, … or your own environment or agent",
    },
    "Inspect": {
        "view": "view a run or an evaluation, or compare several",
        "report": "summarise a run and test its state keys",
        "evaluate": "evaluate a checkpoint, an adapter or a served model",
    },
    "Connect": {
        "credit": "compute the advantages of the calls in an agent's logs",
        "serve": "serve an environment over OpenEnv",
    },
    "About": {"version": "print the versions of g2po-trl, its libraries and Python, for bug reports"},
}
COMMANDS = [name for group in GROUPS.values() for name in group]
_LISTED = "\n\n".join(
    "\n".join([title, *(f"  {name:9} {text}" for name, text in group.items())]) for title, group in GROUPS.items()
)
HELP = f"""usage: g2po COMMAND [ARGUMENTS]

Train language-model agents with G2PO, on top of TRL.

{_LISTED}

Examples
  g2po train alfworld                             a tiny model on small games, on the CPU
  g2po init my_game && cd my_game && g2po check   an environment of your own
  g2po view runs/alfworld-tiny                    its episodes and advantages
  g2po evaluate --model runs/alfworld-tiny --seeds 3

g2po COMMAND --help prints a command's arguments.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command: the first word of `argv`, by default of the command line.

    Raises:
        SystemExit: 1 after an error that the user can fix, 2 for invalid arguments, 130 after Ctrl-C, else the
            command's exit code. Other errors are raised.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    set_up_process()
    if name in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if name in ("--version", "version"):
        from ..runs.run_json import installed_versions  # with numpy

        versions = {**installed_versions(), "python": platform.python_version()}
        print("\n".join(f"{package:14} {number}" for package, number in versions.items()))
        return
    try:
        if name not in COMMANDS:
            remedy = nearest(name.lower(), COMMANDS, f"choose one of {', '.join(COMMANDS)}")
            raise G2POError(f"{name!r} is not a command: {remedy}", "COMMAND", name)
        import_module(f"g2po_trl.cli.commands.{name}").main(rest)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\ng2po {name}: stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if (text := describe_error(error)) is None:
            raise
        print_error(f"g2po {name}", text)
        sys.exit(1 if name in COMMANDS else 2)
