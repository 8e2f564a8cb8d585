"""`g2po init NAME`: write the folder of a new environment or, with `--agent` or `--coding`, of a new agent."""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from ...utils.errors import G2POError
from ..parser import option, parse
from ..recipe_files import bundled_model

STARTER = Path(__file__).parent / "starter"
BUNDLED = "model"  # the bundled model's folder in the new one
FILES = {
    kind: (f"{kind}.py", "tasks.jsonl", "config.yaml", "teach.yaml", f"test_{kind}.py", "README.md")
    for kind in ("environment", "agent")
}
FILES["coding"] = (*FILES["agent"], "run_tests.py", "repositories")
# Of a model from the Hub, and of the bundled one of 0.7 M parameters.
SETTINGS = {"RATE": "1.0e-6", "STEPS": "100", "TOKENS": "128", "TEACH_RATE": "1.0e-4"}
_SMALL = {"RATE": "3.0e-4", "STEPS": "30", "TOKENS": "24", "TEACH_RATE": "1.0e-3"}
BUNDLED_SETTINGS = {
    "environment": _SMALL,
    "agent": _SMALL,
    "coding": {**_SMALL, "STEPS": "30", "TOKENS": "32", "TEACH_RATE": "2.0e-4"},
}

HELD_OUT = 4  # repositories that are never trained on, the last ones of bugs.json
NAMES = """
apple bird boat book bottle box bridge cake card chair city cloud coin color cup day desk dog door dress egg engine
farm field fish flag flower garden glass goal hat hill horse house island jar key kite lake lamp letter mile milk month
night note paper path pen plant plate pool ring river road room rope shelf ship song star street sun tower toy tree
wall wheel
""".split()


def write_folder(folder: Path, model: str | None = None, kind: str = "environment") -> None:
    """Write the files of `FILES[kind]`, none of which may exist, into a folder that is created.

    `model` is written into config.yaml. `None`: the bundled model, which is copied into the folder.
    """
    names = FILES[kind] if model else (*FILES[kind], BUNDLED)
    if there := [name for name in names if (folder / name).exists()]:
        raise G2POError(f"{folder} already holds {', '.join(there)}: choose another name, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    own, settings = folder.resolve().name, SETTINGS if model else BUNDLED_SETTINGS[kind]
    if kind == "coding":
        write_repositories(folder)
    for source in filter(Path.is_file, (STARTER / kind / name for name in FILES[kind])):
        name, text = source.name, source.read_text(encoding="utf-8")
        text = text.replace("runs/{NAME}", quoted(f"runs/{own}", name)).replace("{NAME}", own)
        for key, value in {**settings, "MODEL": quoted(model or BUNDLED, name)}.items():
            text = text.replace(f"{{{key}}}", value)
        (folder / name).write_text(text, encoding="utf-8")
    if model is None:
        own_model = STARTER / kind / BUNDLED
        shutil.copytree(own_model if own_model.is_dir() else bundled_model("alfworld"), folder / BUNDLED)


def write_repositories(folder: Path) -> None:
    """Write the repositories of the coding agent with a mistake each, and tasks.jsonl, which names them.

    bugs.json has pairs of a correct and a faulty text. Each copy has its functions in another order, and each copy for
    training its own names. Otherwise a model would learn the files instead of what mistakes look like.
    """
    sources, names = STARTER / "coding" / "repositories", []
    bugs = json.loads((sources / "bugs.json").read_text(encoding="utf-8"))
    for place, repository in enumerate(bugs):
        code, tests = (
            (sources / repository / name).read_text(encoding="utf-8") for name in ("task.py", "test_task.py")
        )
        trained = place < len(bugs) - HELD_OUT
        for number, (right, wrong) in enumerate(bugs[repository], 1):
            functions = code.strip().replace(right, wrong).split("\n\n\n")
            first = number % len(functions)
            names.append(f"{repository}-{number}")
            texts = {"task.py": "\n\n\n".join([*functions[first:], *functions[:first]]) + "\n", "test_task.py": tests}
            if trained:
                texts = renamed(texts, random.Random(names[-1]))
            copy = folder / "repositories" / names[-1]
            copy.mkdir(parents=True)
            for name, text in texts.items():
                (copy / name).write_text(text, encoding="utf-8")
    lines = [json.dumps({"repository": name}) + "\n" for name in names]
    (folder / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")


def renamed(texts: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Return Python files with new names for the functions, arguments and variables that task.py defines."""
    nodes = list(ast.walk(ast.parse(texts["task.py"])))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given = dict(zip(sorted(own), rng.sample(NAMES, len(own)), strict=True))
    word = re.compile(r"(?<![\w.\"])(test_)?(" + "|".join(own) + r")(?![\w\"])")
    return {name: word.sub(lambda found: (found[1] or "") + given[found[2]], text) for name, text in texts.items()}


def quoted(word: str, file: str) -> str:
    """Return a word quoted for the shell or for YAML, if it has special characters."""
    if quote(word) == word or file.endswith(".py"):
        return word
    return json.dumps(word) if file.endswith(".yaml") else quote(word)


@dataclass
class Options:
    folder: Path = option("the folder; created if it does not exist", positional=True, metavar="NAME")
    agent: bool = option("an agent that calls a model through the openai client, instead of a game", False)
    coding: bool = option("an agent that corrects small repositories, and repositories for it", False)
    model: str | None = option(
        "model of config.yaml, e.g. Qwen/Qwen2.5-0.5B-Instruct; default: a bundled one, which knows few words",
        None,
        metavar="FOLDER|ID",
    )


def main(argv: Sequence[str] | None = None) -> None:
    text = "Write a folder with a small game or agent, its tasks, a configuration and a test."
    options, _ = parse((Options,), argv, command="g2po init", description=text)
    if options.agent and options.coding:
        raise G2POError("agent and coding are both given: a coding agent is an agent; leave --agent out")
    folder, kind = options.folder, "coding" if options.coding else "agent" if options.agent else "environment"
    try:
        write_folder(folder, options.model, kind)
    except OSError as error:
        raise G2POError(f"{folder} cannot be written ({error}): choose another folder") from error
    copied = "" if options.model else f", {BUNDLED}/ ({'0.2' if kind == 'coding' else '0.7'} M parameters)"
    print(f"{folder}: {', '.join(FILES[kind])}{copied}\nNext: cd {quote(str(folder))} && g2po check")
