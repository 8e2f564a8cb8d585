"""Write docs/configuration.md and docs/cli.md from the code: `python docs/make_reference.py`. A test compares them."""

import contextlib
import io
import os
import re
import textwrap
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

from trl import GRPOConfig

from g2po_trl import G2POConfig, PPOConfig
from g2po_trl.cli import COMMANDS
from g2po_trl.cli import HELP as COMMANDS_HELP
from g2po_trl.config_validation import inherited

PAGE = Path(__file__).with_name("configuration.md")
CLI_PAGE = Path(__file__).with_name("cli.md")
CLI_HEAD = """# Command line

<!-- python docs/make_reference.py -->

`g2po COMMAND --help` prints the arguments of a command, and `g2po train TARGET --help-all` every flag of a recipe with
its default.

- **Environments** are `FILE.py:Class` or `module:Class`; except for `train`, `FILE.py` suffices if it contains one
  environment. `check`, `teach`, `train` and `evaluate` also take the address of an OpenEnv server.
- **[Agents](agents.md)** are `--agent FILE.py[:NAME]` instead.
- **Files next to FILE.py.** `tasks.jsonl` has the tasks, `config.yaml` the settings of `train`, `teach.yaml` those of
  `teach`. Relative paths in them start in their folder.
- **Configurations.** `--config` takes a YAML file, or the name of a bundled one:
  `g2po train alfworld --config alfworld/qwen2.5-1.5b-lora`. Flags override this file, and the file overrides the run
  (`evaluate`) and the defaults.
- An error with a traceback is a bug: please report it.
- **Exit codes.** 1: an error. 2: wrong arguments. 3: the model was trained and saved, but not pushed to the Hub. 130:
  stopped by Ctrl-C; the message says how to resume.
- Flags may be spelled with `-` or `_`. `--no-FLAG` and `--FLAG false` turn a flag off.

"""
GUIDES = {  # commands whose details are on another page
    "report": "[The report](reading_a_run.md#the-report)",
    "evaluate": "[Evaluate, serve and publish](evaluation.md)",
    "credit": "[Credit for logged runs](elsewhere.md#credit-for-logged-runs)",
    "serve": "[On other machines](environments.md#on-other-machines-openenv)",
}
HEAD = """# Configuration

<!-- python docs/make_reference.py -->

`G2POConfig` is a subclass of TRL's [`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig). These
fields are new or have another default, in parentheses after the type. In recipes, each field is a flag and a YAML key.
[Hyperparameters](hyperparameters.md) has starting values, [the method](method.md#estimators) the estimators."""


def type_of(config: type, name: str) -> str:
    """Return the type as it is written, without `None`, which is then the default.

    It stands in the class: `field.type` is changed by transformers' argument parser.
    """
    annotations = (one.__dict__.get("__annotations__", {}) for one in config.__mro__)
    written = next(one[name] for one in annotations if name in one)
    written = written if isinstance(written, str) else getattr(written, "__name__", str(written))
    return f"`{re.sub(r' ?[|] ?None', '', written)}`"


def default_of(field) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return f"`{value!r}`"


def rows_of(config: type, parent: type) -> dict[str, str]:
    """Return the entry of each field that is new or has another default."""
    rows = {}
    inherited = {field.name: field for field in fields(parent)}
    for field in fields(config):
        changed = field.name in inherited and inherited[field.name].default != field.default
        if field.name in inherited and not changed:
            continue
        text = field.metadata.get("help", "")
        note = f"; {parent.__name__}: {default_of(inherited[field.name])}" if changed else ""
        described = f"{type_of(config, field.name)}, {default_of(field)}{note}"
        rows[field.name] = f"- `{field.name}` ({described}): {text[:1].upper()}{text[1:]}"
    return rows


def by_group() -> list[str]:
    """Return a section for each group of fields, by their metadata."""
    sections: dict[str, list[str]] = {}
    group_of = {field.name: field.metadata.get("group") for field in fields(G2POConfig)}
    for name, row in rows_of(G2POConfig, GRPOConfig).items():
        sections.setdefault(group_of[name], []).append(row)
    return [line for group, rows in sorted(sections.items()) for line in (f"\n## {group}\n", *rows)]


def names_of(options) -> str:
    return ", ".join(f"`{name}`" for name in options) + "."


def page() -> str:
    parts = [
        HEAD,
        *by_group(),
        "\n## PPOConfig\n\nThe fields of `G2POConfig` without the estimator's, and:\n",
        *rows_of(PPOConfig, G2POConfig).values(),
        "\n## Refused\n\nThese options of `GRPOConfig` raise an error that says why, and what to set instead:",
        names_of(inherited("refused")),
        "\nThese have no effect, and a warning says so:",
        names_of(inherited("no_effect")),
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


def shortened(text: str, has_guide: bool) -> str:
    """Return a help text with the names of its flags in place of descriptions; with a guide, only its first lines."""
    blocks, flags = [], []
    if has_guide:  # usage and the first paragraph, then the arguments
        usage, first, *others = text.split("\n\n")
        text = "\n\n".join([usage, first, *(block for block in others if re.match(r"[\w ]+:\n", block))])
    for block in text.split("\n\n"):
        found = re.findall(r"^  (--[\w-]+)", block, re.MULTILINE)
        if re.match(r"[\w ]+:\n", block) and (found or "-h, --help" in block):
            flags += found
        else:
            blocks.append(block)
    return "\n\n".join(
        [*blocks, *([textwrap.fill(f"Flags: {', '.join(flags)}", 110, break_on_hyphens=False)] if flags else [])]
    )


def cli_page() -> str:
    parts = [CLI_HEAD, "```text", COMMANDS_HELP.rstrip(), "```"]
    for command in COMMANDS:
        if command != "version":  # it has no options
            parts += [f"\n## g2po {command}\n", "```text", shortened(help_of(command), command in GUIDES), "```"]
            parts += [f"\nExamples and details: {GUIDES[command]}."] if command in GUIDES else []
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
