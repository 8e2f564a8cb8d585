"""`g2po init NAME`: write the folder of a new environment or, with `--agent` or `--coding`, of a new agent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import g2po_envs

from ...utils.options import option, require
from ..parser import parse

_ENVIRONMENTS = Path(g2po_envs.__file__).parent
SOURCES = {kind: _ENVIRONMENTS / "starters" / kind for kind in ("environment", "agent")}
SOURCES["coding"] = _ENVIRONMENTS / "coding"
BUNDLED = "model"  # the bundled model's folder in the new one
FILES = {
    kind: (f"{kind}.py", "tasks.jsonl", "config.yaml", "teach.yaml", f"test_{kind}.py", "README.md")
    for kind in ("environment", "agent")
}
FILES["coding"] = (*FILES["agent"], "run_tests.py", "repositories")
# Of a model from the Hub, and of the bundled ones of less than a million parameters.
SETTINGS = {"RATE": "1.0e-6", "STEPS": "100", "TOKENS": "128", "TEACH_RATE": "1.0e-4"}
_SMALL = {"RATE": "3.0e-4", "STEPS": "30", "TOKENS": "24", "TEACH_RATE": "1.0e-3"}
BUNDLED_SETTINGS = dict.fromkeys(FILES, _SMALL) | {"coding": {**_SMALL, "TOKENS": "32", "TEACH_RATE": "2.0e-4"}}


def write_folder(folder: Path, model: str | None = None, kind: str = "environment") -> None:
    """Write the files of `FILES[kind]`, none of which may exist, into a folder that is created.

    `model` is written into config.yaml. `None`: the bundled model, which is copied into the folder.
    """
    source, names = SOURCES[kind], FILES[kind] if model else (*FILES[kind], BUNDLED)
    there = [name for name in names if (folder / name).exists()]
    remedy = f"it already holds {', '.join(there)}, choose another name, or move them away"
    require(not there, "folder", str(folder), remedy)
    folder.mkdir(parents=True, exist_ok=True)
    own, settings = folder.resolve().name, SETTINGS if model else BUNDLED_SETTINGS[kind]
    for file in filter(Path.is_file, (source / name for name in FILES[kind])):
        text = file.read_text(encoding="utf-8")
        for key, word in (("runs/{NAME}", f"runs/{own}"), ("{MODEL}", model or BUNDLED)):
            # YAML has other quotes than the shell
            quoted = json.dumps(word) if file.suffix == ".yaml" and quote(word) != word else quote(word)
            text = text.replace(key, quoted)
        for key, word in {"NAME": own, **settings}.items():
            text = text.replace(f"{{{key}}}", word)
        (folder / file.name).write_text(text, encoding="utf-8")
    for line in (source / "repositories.jsonl").open(encoding="utf-8") if kind == "coding" else ():
        files = json.loads(line)
        copy = folder / "repositories" / files.pop("repository")
        copy.mkdir(parents=True)
        for name, text in files.items():
            (copy / name).write_text(text, encoding="utf-8")
    if model is None:
        trained = source / BUNDLED if kind == "coding" else _ENVIRONMENTS / "alfworld" / "tiny_model"
        shutil.copytree(trained, folder / BUNDLED)


@dataclass
class Options:
    folder: Path = option("the folder; created if it does not exist", positional=True, metavar="NAME")
    agent: bool = option("an agent that calls a model by the openai client, not a game", False, needs="coding=False")
    coding: bool = option("an agent that corrects small repositories, and repositories for it", False)
    model: str | None = option("default: a bundled model, which knows few words", None, metavar="FOLDER|ID")


def main(argv: Sequence[str] | None = None) -> None:
    text = "Write a folder with a small game or agent, its tasks, a configuration and a test."
    options, _ = parse((Options,), argv, command="g2po init", description=text)
    folder, kind = options.folder, "coding" if options.coding else "agent" if options.agent else "environment"
    write_folder(folder, options.model, kind)
    copied = "" if options.model else f", {BUNDLED}/ ({'0.2' if kind == 'coding' else '0.7'} M parameters)"
    print(f"{folder}: {', '.join(FILES[kind])}{copied}\nNext: cd {quote(str(folder))} && g2po check")
