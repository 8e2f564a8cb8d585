"""Write docs/configuration.md and docs/cli.md from the code: `python docs/make_reference.py`. A test compares them."""

import contextlib
import importlib.util
import io
import os
import re
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

from trl import GRPOConfig

from g2po_trl import G2POConfig, PPOConfig
from g2po_trl.cli import COMMANDS
from g2po_trl.cli import HELP as COMMANDS_HELP
from g2po_trl.config_validation import REFUSED, WITHOUT_EFFECT

PAGE = Path(__file__).with_name("configuration.md")
CLI_PAGE = Path(__file__).with_name("cli.md")
RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE_NAMES = ("alfworld", "sokoban", "textworld", "webshop", "appworld", "environment")
CLI_HEAD = """# Command line

*Written by `python docs/make_reference.py` from the code.*

`g2po` is installed with the package; `python -m g2po_trl` is the same.

- **Environments.** `check`, `play`, `train`, `teach`, `evaluate` and `serve` take `FILE.py:Class` or `module:Class`;
  all but `train` also `FILE.py` if it contains one environment, all but `serve` the address of an OpenEnv server. The
  tasks are `tasks.jsonl` in the folder of the file.
- **Agents.** `--agent FILE.py[:NAME]` takes an [agent](agents.md) instead. If the file contains one, leave out the
  name.
- **`g2po train`** trains the environment in `environment.py`, else the agent in `agent.py`; `g2po train FILE.py:Class`
  another one. Both use `config.yaml` and `tasks.jsonl` in the folder of the file; relative paths in that `config.yaml`
  start there.
- **Configurations.** `--config` takes a YAML file, or the name of a bundled one:
  `g2po train alfworld --config alfworld/qwen2.5-1.5b-lora`. A value comes from the flags, else from this file, else
  from the run (`evaluate`), else it is the default.
- **Processes.** `--num-processes N` starts N processes through Accelerate, on the CPU if there is no GPU. For several
  machines: `accelerate launch --config_file FILE -m g2po_trl train alfworld`.
- **Errors** in flags and keys, missing files and missing packages are reported before tasks and models are loaded.
  An error with a traceback is a bug: please report it.
- **Exit codes.** 1: an error. 2: wrong arguments. 3: the model was trained and saved, but not pushed to the Hub. 130:
  stopped by Ctrl-C; the message says how to resume.
- Flags may be spelled with `-` or `_`. Of a flag without a value, `--no-FLAG` and `--FLAG false` are the opposite.

"""
HEAD = """# Configuration

*Written by `python docs/make_reference.py` from the code.*

`G2POConfig` is a subclass of TRL's [`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig). This
page lists the fields that are new or have another default. In recipes, each field is a flag and a YAML key. [Choosing
hyperparameters](hyperparameters.md) has starting values, and what to change first.
"""


def default_of(field) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return f"`{value!r}`"


def table(config: type, parent: type) -> list[str]:
    rows = ["| Field | Default | Description |", "|---|---|---|"]
    inherited = {field.name: field for field in fields(parent)}
    for field in fields(config):
        changed = field.name in inherited and inherited[field.name].default != field.default
        if field.name in inherited and not changed:
            continue
        said = field.metadata.get("help", "")
        note = f" ({parent.__name__}: {default_of(inherited[field.name])})" if changed else ""
        rows.append(f"| `{field.name}` | {default_of(field)} | {said[:1].upper()}{said[1:]}{note} |")
    return rows


def by_reason(options: dict[str, tuple]) -> list[str]:
    """Return one line for each reason, with the options that it is given for."""
    names = {}
    for name, (_, reason) in options.items():
        names.setdefault(reason, []).append(f"`{name}`")
    return [f"- {', '.join(these)}: {reason}." for reason, these in names.items()]


def page() -> str:
    parts = [
        HEAD,
        "## G2POConfig\n",
        *table(G2POConfig, GRPOConfig),
        "\n## PPOConfig\n\nThe fields of `G2POConfig`, and:\n",
        *table(PPOConfig, G2POConfig),
        "\n## Refused\n\nThese options of `GRPOConfig` do not apply to G2PO and raise an error if they are set:\n",
        *by_reason(REFUSED),
        "\nThese are harmless and only warned about:\n",
        *by_reason(WITHOUT_EFFECT),
    ]
    return "\n".join(parts) + "\n"


def help_of(command: str) -> str:
    text, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            import_module(f"g2po_trl.cli.commands.{command}").main(["--help"])
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return text.getvalue().rstrip()


def told_once(command: str, text: str, told: dict[str, str]) -> str:
    """Return a help text without the groups of options that an earlier command has, too. `told`: where they are."""
    blocks = []
    for block in text.split("\n\n"):
        options = block.partition("\n")[2] if re.match(r"[\w ]+:\n", block) else None
        known = told.setdefault(options, command) if options else command
        blocks.append(block if known == command else f"{block.partition(':')[0]}: as for g2po {known}")
    return "\n\n".join(blocks)


def script_arguments(recipe: str) -> list[str]:
    spec = importlib.util.spec_from_file_location(recipe, RECIPES / f"train_{recipe}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = ["| Flag | Default | Description |", "|---|---|---|"]
    for field in fields(module.ScriptArguments):
        choices = ", ".join(f"`{choice}`" for choice in field.metadata.get("choices", ()))
        text = field.metadata["help"] + (f" One of {choices}." if choices else "")
        rows.append(f"| `--{field.name.replace('_', '-')}` | {default_of(field)} | {text} |")
    return rows


def cli_page() -> str:
    parts, told = [CLI_HEAD, "```text", COMMANDS_HELP.rstrip(), "```"], {}
    for command in COMMANDS[:-1]:  # all but version
        parts += [f"\n## g2po {command}\n", "```text", told_once(command, help_of(command), told), "```"]
        for recipe in (
            ("alfworld", "sokoban", "textworld", "webshop", "appworld", "environment") if command == "train" else ()
        ):
            parts += [f"\n### Flags of recipes/train_{recipe}.py\n", *script_arguments(recipe)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
