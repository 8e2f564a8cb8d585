"""`g2po completion bash|zsh`: a script that completes commands, their flags, and what these take.

Written out once, with all words in it, so that a TAB starts no Python. (shtab would want one argparse parser with all
commands in it; the flags of `g2po train` are fields of dataclasses that take ten seconds to import.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..arguments import Parser
from . import COMMANDS
from .teach import targets
from .train import HELP, config_names, recipe_names

BASH = """# g2po completion bash > ~/.local/share/bash-completion/completions/g2po
_g2po() {
    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then words="@COMMANDS@ --help --version"
    else case "$command $previous" in
@VALUES@
        *) case "$command" in
@FLAGS@
        esac
        case "$word" in -*) ;; *) [ "$command $previous" = "train train" ] && words="@TARGETS@" || words="" ;; esac ;;
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _g2po g2po
"""
ZSH_HEAD = """#compdef g2po
# g2po completion zsh > "${fpath[1]}/_g2po"
autoload -U +X bashcompinit && bashcompinit
"""


def flags_of(command: str) -> list[str]:
    """The flags in a command's help."""
    if command == "train":
        return sorted({*re.findall(r"--[a-z][a-z0-9_-]*", HELP), *_fields()})
    import contextlib
    import io
    from importlib import import_module

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        import_module(COMMANDS[command][0]).main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text.getvalue())))


def _fields() -> list[str]:
    """Fields of the configurations: flags of every recipe."""
    from dataclasses import fields

    from trl import ModelConfig

    from ..config import G2POConfig

    return [f"--{one.name}" for config in (G2POConfig, ModelConfig) for one in fields(config)]


def script(shell: str) -> str:
    """The completion script of a shell."""
    values = {"train --config": config_names(), "train --accelerate_config": config_names("accelerate")}
    values["completion completion"] = ["bash", "zsh"]
    values["teach teach"] = targets()
    values["train --advantage_estimator"] = re.search(r"--advantage_estimator (\S+)", HELP)[1].split("|")
    cases = [f'        "{case}") words="{" ".join(words)}" ;;' for case, words in values.items()]
    flags = [f'            {name}) words="{" ".join(flags_of(name))}" ;;' for name in COMMANDS]
    parts = {"VALUES": "\n".join(cases), "FLAGS": "\n".join(flags)}
    parts |= {"COMMANDS": " ".join(COMMANDS), "TARGETS": " ".join(recipe_names())}
    text = BASH
    for name, content in parts.items():
        text = text.replace(f"@{name}@", content)
    return ZSH_HEAD + text.partition("\n")[2] if shell == "zsh" else text


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="g2po completion",
        description="Print a script that completes the commands of g2po, their flags and their values.\n\n"
        "    g2po completion bash > ~/.local/share/bash-completion/completions/g2po\n"
        '    g2po completion zsh > "${fpath[1]}/_g2po"',
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    print(script(parser.parse_args(argv).shell), end="")
