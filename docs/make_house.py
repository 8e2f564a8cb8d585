"""Draw the rooms of the package and their imports, from the source, into docs/contributing/house.md.

    python docs/make_house.py [--check]

`--check` writes nothing and exits with 1 if docs/contributing/house.md is not what would be written.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "g2po_trl"
PAGE = Path(__file__).parent / "contributing" / "house.md"
BEGIN, END = "<!-- written by docs/make_house.py -->", "<!-- to here -->"
# In the order of the data. The modules at the top of the package are rooms of one file.
ORDER = (
    "utils", "trajectory", "prompts", "environments", "agents", "engines", "rollout", "credit", "update", "runs",
    "config_validation", "config", "trainer_validation", "trainer", "ppo",
    "evaluation", "view", "check", "teach", "estimate", "report", "logs", "cli",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Return the path of each module, by its dotted name within the package; a package has the name of its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports anywhere, for type checkers alone, or names in a string
    `"g2po_trl.module:NAME"`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            absolute = (node.module or "").split(".") if node.module else []
            if node.level:
                words = [*package[: len(package) - (node.level - 1)], *absolute]
            elif absolute[:1] == [PACKAGE.name]:
                words = absolute[1:]
            else:
                continue
            base = ".".join(words)
            found |= {name if (name := f"{base}.{alias.name}".lstrip(".")) in known else base for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(rf"{PACKAGE.name}\.([\w.]+):\w+", node.value)
            found |= {named.group(1)} if named else set()
    return {name for name in found if name in known and name}


def imports() -> dict[str, set[str]]:
    """Return, for each module, the modules it imports."""
    known = modules()
    return {name: imports_of(path, known) - {name} for name, path in known.items() if name}


def room_of(module: str) -> str:
    """Return the room of a module: its folder at the top of the package, or the module itself."""
    return module.partition(".")[0]


def between_rooms() -> dict[str, dict[str, list[str]]]:
    """Return, by room and imported room, the imports as `module -> module`."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, names in imports().items():
        for name in sorted(names):
            if room_of(module) != room_of(name) and module != "__main__":
                found[room_of(module)][room_of(name)].append(f"{module} -> {name}")
    return found


def circles() -> Iterator[list[str]]:
    """Yield the sets of modules that import each other in a circle (Tarjan's strongly connected components)."""
    edges, index, low, stack = imports(), {}, {}, []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in sorted(edges.get(module, ())):
            if name not in index:
                yield from visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], index[name])
        if low[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                yield sorted(circle)

    for module in edges:
        if module not in index:
            yield from visit(module)


def rooms() -> list[str]:
    """Return the folders at the top of the package, in the order of the data."""
    return [room for room in ORDER if (PACKAGE / room / "__init__.py").exists()]


def purpose(folder: Path) -> str:
    """Return the first sentence of a folder's description, without the name in front of the colon."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(": ", 1)[-1].rstrip(".")


def drawing() -> str:
    """Return the list of rooms and the graph of their imports but `utils`, as Markdown."""
    between = between_rooms()
    lines = []
    for room in rooms():
        for folder in (PACKAGE / room, *sorted(path.parent for path in (PACKAGE / room).glob("*/__init__.py"))):
            name = folder.relative_to(PACKAGE).as_posix()
            lines.append(f"- `{name}/`: {purpose(folder)}")
    graph = []
    for room in ORDER:
        if others := sorted(set(between.get(room, ())) - {"utils"}, key=ORDER.index):
            graph.append(f"{room:<19}-> {', '.join(others)}")
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
