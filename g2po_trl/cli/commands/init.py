"""`g2po init NAME`: write the folder of a new environment, or with `--agent` of a new agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ...utils.parser import Parser

STARTER = Path(__file__).parent / "starter"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
FILES = {
    kind: (f"{kind}.py", "tasks.jsonl", "config.yaml", f"test_{kind}.py", "README.md")
    for kind in ("environment", "agent")
}


def write_folder(folder: Path, model: str = MODEL, kind: str = "environment") -> None:
    """Write the files of `FILES[kind]` into a folder.

    Raises:
        FileExistsError: if one of them exists.
    """
    if there := [name for name in FILES[kind] if (folder / name).exists()]:
        raise FileExistsError(f"{folder} already holds {', '.join(there)}: choose another name, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES[kind]:
        text = (STARTER / kind / name).read_text(encoding="utf-8")
        own = folder.resolve().name
        text = text.replace("runs/{NAME}", quoted(f"runs/{own}", name)).replace("{NAME}", own)
        text = text.replace("{MODEL}", quoted(model, name))
        (folder / name).write_text(text, encoding="utf-8")


def quoted(word: str, file: str) -> str:
    """Return a word quoted for the shell or for YAML, if it has special characters."""
    if quote(word) == word or file.endswith(".py"):
        return word
    return json.dumps(word) if file.endswith(".yaml") else quote(word)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="g2po init", description="Write a folder with a small game, its tasks, a configuration and a test."
    )
    parser.add_argument("folder", metavar="NAME", type=Path, help="the folder; created if it does not exist")
    agent = "an agent that calls a model through the openai client, instead of a game"
    parser.add_argument("--agent", action="store_true", help=agent)
    parser.add_argument(
        "--model", metavar="FOLDER|ID", default=MODEL, help="written into config.yaml; default: %(default)s"
    )
    args = parser.parse_args(argv)
    kind = "agent" if args.agent else "environment"
    try:
        write_folder(args.folder, args.model, kind)
    except OSError as error:
        if error.errno is None:
            raise SystemExit(str(error)) from error
        raise SystemExit(f"{args.folder} cannot be written ({error}): choose another folder") from error
    commands = "g2po check && g2po train" if kind == "environment" else "g2po check --agent agent.py"
    print(f"{args.folder}: {', '.join(FILES[kind])}\nNext: cd {quote(str(args.folder))} && {commands}")
