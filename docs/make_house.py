"""Draws the rooms of the package and who imports whom, from the source: docs/house.md.

    python docs/make_house.py [--check]

`--check` writes nothing and ends with 1 if docs/house.md is not what would be written.
"""

import argparse
import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "g2po_trl"
PAGE = Path(__file__).parent / "house.md"
BEGIN, END = "<!-- written by docs/make_house.py -->", "<!-- to here -->"
BASE = ("trajectory", "json_text", "objects", "installing", "arguments", "masking", "sdpa")  # what every room may use
ORDER = ("environments", "rollout", "credit", "update", "runs", "agents", "report", "view", "cli")


def rooms() -> list[str]:
    """Folders of the package, in the order of the data's way through them."""
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return [room for room in ORDER if room in found] + sorted(found - set(ORDER))


def imports_of(path: Path) -> set[str]:
    """Rooms, and modules outside of rooms, that a file imports; not what it names for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or node in for_types:
            continue
        base = package[: len(package) - (node.level - 1)]
        words = [*base, *(node.module or "").split(".")] if node.module else [*base]
        found |= {words[0]} if words else {alias.name for alias in node.names}
    return found


def imports() -> dict[str, set[str]]:
    """By room, the other rooms and modules beside them that it imports."""
    return {
        room: {name for path in (PACKAGE / room).glob("*.py") for name in imports_of(path)} - {room}
        for room in rooms()
    }


def purpose(room: str) -> str:
    """The first sentence of the room's description."""
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(": ", 1)[-1].rstrip(".")


def drawing() -> str:
    """Table and graph, as Markdown."""
    known = rooms()
    between = {room: [name for name in known if name in names] for room, names in imports().items()}
    lines = ["| room | what it is for | imports | files |", "| --- | --- | --- | --- |"]
    for room, others in between.items():
        files = sorted(path.stem for path in (PACKAGE / room).glob("*.py") if not path.stem.startswith("__"))
        shown = ", ".join(f"`{other}`" for other in others) or "–"
        lines.append(f"| `{room}/` | {purpose(room)} | {shown} | {', '.join(files)} |")
    graph = [f"{room:<13}-> {', '.join(others) or '–'}" for room, others in between.items()]
    return "\n".join([*lines, "", "```text", *graph, "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    made = f"{before}{BEGIN}\n\n{drawing()}\n\n{END}{rest.partition(END)[2]}"
    if args.check:
        sys.exit(0 if made == page else f"{PAGE} is not what the source says: run python docs/make_house.py")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
