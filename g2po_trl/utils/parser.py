"""Argument parsing shared by all `g2po` commands: a lenient `ArgumentParser`, removed options, YAML files."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Removed option -> its replacement. Refused on the command line and in YAML.
REMOVED = {
    "update_while_playing": "leave it out, updates begin when all episodes of a rollout have ended",
    "stream_rollouts": "leave it out, rollouts stream if the engine can (colocated vLLM and vllm_servers)",
    "state_similarity": "set state_key to similar:NUMBER, e.g. similar:0.9",
    "overlap_environments": "set use_vllm: its rollouts stream, and environments step while others are answered",
}
# (option, object, its entry): options that an earlier version had beside the object.
_MOVED = [
    ("use_node_advantage", "estimator_kwargs", "node_centric"),
    ("use_edge_advantage", "estimator_kwargs", "edge_centric"),
    ("use_group_aggregation", "estimator_kwargs", "aggregate"),
    ("episode_statistics", "estimator_kwargs", "episode_statistics"),
    ("graphgpo_omega", "estimator_kwargs", "omega"),
    ("hgpo_depth_exponent", "estimator_kwargs", "depth_exponent"),
    ("crbc_step_weight", "estimator_kwargs", "value_weight"),
    ("crbc_gamma", "estimator_kwargs", "gamma"),
    ("crbc_least_std", "estimator_kwargs", "least_std"),
]
REMOVED |= {
    option: f'set rollout_strategy to {strategy}, and rollout_strategy_kwargs to {{"{entry}": VALUE}}'
    for option, strategy, entry in (
        ("refill_groups", "dynamic_sampling", "max_generation_batches"),
        ("rollouts_ahead", "partial_rollouts", "max_off_policy_steps"),
    )
}
REMOVED |= {
    option: f"write {whole}: {{{entry}: VALUE}}, or as a flag --{whole} '{{\"{entry}\": VALUE}}'"
    for option, whole, entry in _MOVED
}
# (option, removed value, its replacement).
_REMOVED_VALUES = [("value_lambda", "auto", "set a number from 0 to 1 (g2po report RUN tests a run's state keys)")]


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that accepts `--max_turns` for `--max-turns`, as `g2po train` spells its options.

    Args:
        short_help: text printed by `--help`; argparse's own help is then printed by `--help-all`.
    """

    def __init__(self, short_help: str | None = None, **options: Any):
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
        super().__init__(**{"formatter_class": shape, "add_help": short_help is None, **options})
        if short_help is not None:
            self.add_argument("-h", "--help", action=_Print, text=short_help, help="print a short help and exit")
            self.add_argument("--help-all", action=_Print, help="print this help and exit")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(word) for word in words], namespace)


class _Print(argparse.Action):
    def __init__(self, option_strings, dest, text: str | None = None, help: str | None = None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.text = text

    def __call__(self, parser, namespace, values, option_string=None):
        print(self.text if self.text is not None else parser.format_help(), end="")
        parser.exit()


def _hyphenated(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if re.fullmatch(r"--[A-Za-z][\w-]*", name) else word


def take_options(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of some options by name, each option's last one, and all other words."""
    values, rest, words = {}, [], list(words)
    while words:
        option, equals, value = (word := words.pop(0)).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in names:
            rest.append(word)
        elif not equals and (not words or words[0].startswith("--")):
            raise ValueError(f"{option} has no value: write {option} VALUE")
        else:
            values[name] = value if equals else words.pop(0)
    return values, rest


def json_object(text: str) -> dict[str, Any]:
    """Return an argument that is a JSON object. Raises `ArgumentTypeError` for any other text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: write {{"name": value}}')
    return value


# Names that other libraries have for an option, less alike to it than to another one.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "group_size": "num_generations",
}


def describe_unknown(parser: argparse.ArgumentParser, word: str, where: str, help_flag: str = "--help") -> str:
    """Return why a word is not a flag: its option was removed, or it is misspelled. `where`: the noun, e.g. "flag"."""
    option = word.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_")
    if word.startswith("--") and option in REMOVED:
        return f"{option} was removed: {REMOVED[option]}"
    names = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    usual = f"--{_OTHER_NAMES.get(option)}"
    near = [usual] if usual in names else difflib.get_close_matches(word.partition("=")[0], names, 1)
    remedy = f"did you mean {near[0]}?" if near else f"{help_flag} lists all options"
    return (
        f"{word} is not a {where}: {remedy}"
        if word.startswith("-")
        else f"{word!r} does not belong to a flag: {remedy}"
    )


def refuse_removed(keys: Mapping[str, Any], argv: Sequence[str] = ()) -> None:
    """Refuse removed values of options, in a configuration or on a command line."""
    words = [part for word in argv for part in word.split("=", 1)]
    flags = ((name.lstrip("-").replace("-", "_"), value) for name, value in zip(words, words[1:]))
    given = [*flags, *keys.items()]
    for name, value, remedy in _REMOVED_VALUES:
        if (name, value) in given:
            raise ValueError(f"{name} is {value!r}, which was removed: {remedy}")


def read_config(path: str | Path | None) -> dict[str, Any]:
    """Return the fields of a YAML file, without `env`, which TRL reads as environment variables."""
    if path is None:
        return {}
    import yaml

    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config is {str(path)!r}, which cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config is {str(path)!r}, which cannot be read: {reason}") from error
    if not isinstance(keys, dict) or not all(isinstance(name, str) for name in keys):
        raise ValueError(f"config is {str(path)!r}, which contains no fields: write one per line, like max_steps: 100")
    return {name: value for name, value in keys.items() if name != "env"}
