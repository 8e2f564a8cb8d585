"""`g2po init NAME`: write the folder of a new environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ...utils.parser import Parser

STARTER = Path(__file__).parent / "starter"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
FILES = ("environment.py", "tasks.jsonl", "config.yaml", "test_environment.py", "README.md")


def write_folder(folder: Path, model: str = MODEL) -> None:
    """Write the files of `FILES` into a folder.

    Raises:
        FileExistsError: if one of them exists.
    """
    if there := [name for name in FILES if (folder / name).exists()]:
        raise FileExistsError(f"{folder} already holds {', '.join(there)}: choose another name, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = (STARTER / name).read_text(encoding="utf-8")
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
    parser.add_argument(
        "--model", metavar="FOLDER|ID", default=MODEL, help="written into config.yaml; default: %(default)s"
    )
    args = parser.parse_args(argv)
    try:
        write_folder(args.folder, args.model)
    except OSError as error:
        if error.errno is None:
            raise SystemExit(str(error)) from error
        raise SystemExit(f"{args.folder} cannot be written ({error}): choose another folder") from error
    print(f"{args.folder}: {', '.join(FILES)}\nNext: cd {quote(str(args.folder))} && g2po check && g2po train")
