"""Writes docs/api.md from signatures and docstrings: `python docs/make_api.py`. A test compares them.

It reads the source and imports nothing of it, so that it takes a moment, and needs neither torch nor the extras that
some modules do. Why a committed page, and not Sphinx's autodoc: the page is the same on the site, on GitHub and in an
editor, and a change of an interface shows in the diff.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "g2po_trl"
PAGE = Path(__file__).with_name("api.md")
WIDTH = 110
HEAD = """# Python API

*Written by `python docs/make_api.py` from the code.*

Names without a module are imported from `g2po_trl`, which loads each on first use: trajectories, graphs and
estimators need neither torch nor TRL. Times are in seconds and lengths in tokens, if not said otherwise.
"""
# Section -> its introduction, and its names: public ones, or module:name.
SECTIONS = {
    "Training": (
        "All other methods and arguments are those of TRL's "
        "[`GRPOTrainer`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOTrainer).",
        "G2POTrainer G2POConfig PPOTrainer PPOConfig HubError",
    ),
    "Environments": (
        "How to write one: [environments](environments.md).",
        "TextEnvironment Observation StepResult check_environment tasks_dataset check:examine "
        "random_episodes:Finding ToolEnvironment environments.tools:text_environment_factory "
        "environments.tools:BrokenEnvironmentError GymnasiumEnvironment TextArenaEnvironment "
        "VerifiersEnvironment openenv:RemoteEnvironment openenv:make_app EnvironmentPool "
        "environments.replay:EnvironmentFailure",
    ),
    "Rollout": (
        "From tasks to trajectories, without a trainer: [an example](house.md#playing-without-a-trainer).",
        "Player PromptActor PromptTemplate rollout.prompting:ParsedReply rollout.prompting:parse_think_action "
        "rollout.prompting:parse_as_released rollout.prompting:parse_plain Sampling TransformersEngine "
        "rollout.offline_vllm:OfflineVLLMEngine rollout.stats:RolloutStats",
    ),
    "Trajectories": (
        "What an episode leaves. A run writes them to `output_dir/trajectories`.",
        "Step Trajectory read_jsonl write_jsonl",
    ),
    "State graph and advantages": (
        "Equations: [method](method.md). With numbers: [a worked example](worked_example.md). In other frameworks: "
        "[elsewhere](elsewhere.md). Shapes: $S$ steps, $M$ trajectories, $N$ nodes.",
        "StateGraph TrajectoryRecord g2po gigpo grpo rloo graphgpo hgpo crbc episode_advantage node_advantage "
        "edge_advantage credit.flat:step_advantages credit.flat:spread_over_tokens credit.prediction:LambdaChoice "
        "NormalisedKey",
    ),
    "Evaluation and agents": (
        "The parts of [`g2po evaluate`](evaluation.md).",
        "runs.panel:Panel runs.evaluation:summarize agents.play:PanelPlayer agents.ask:Agent agents.ask:DirectAgent "
        "agents.ask:ReActAgent agents.ask:ReflexionAgent agents.chat:ChatModel agents.chat:load_local "
        "agents.chat:load_vllm agents.chat:ServerChat agents.chat:ChatSettings agents.chat:TokenBudget",
    ),
    "Viewer and report": (
        "The parts of [`g2po view` and `g2po report`](viewer.md).",
        "view.sources:open_folder view.sources:Sources view.page:write_page view.page:InlinePage "
        "report.analysis:load_iterations report.analysis:Iteration report.analysis:value_variation "
        "report.analysis:group_sizes report.analysis:turns_to_finish report.analysis:value_errors "
        "report.plots:learning_curves report.plots:sweep report.plots:save",
    ),
}
# Class -> methods that are shown. All that have a docstring, of the others.
METHODS = {
    "G2POTrainer": "train evaluate play push_to_hub close",
    "G2POConfig": "optimizer_steps_per_iteration",
    "PPOTrainer": "",
    "GymnasiumEnvironment": "reset read_observation read_action",
    "TextArenaEnvironment": "",
    "VerifiersEnvironment": "reset",
    "ToolEnvironment": "",
    "RemoteEnvironment": "",
    "EnvironmentPool": "reset step begin send receive wait fileno end check close replayed recycled",
    "Player": "play rollout",
    "PromptActor": "of",
    "Sampling": "",
    "TransformersEngine": "of generate",
    "OfflineVLLMEngine": "",
    "RolloutStats": "",
    "TrajectoryRecord": "",
    "LambdaChoice": "choose",
    "ReActAgent": "",
    "DirectAgent": "",
    "ServerChat": "",
    "ChatSettings": "",
    "ChatModel": "reply",
    "TokenBudget": "",
    "Sources": "",
}
Named = ast.ClassDef | ast.FunctionDef
_NAME = r"(?:`[^`]+`|[\w*]+)"
ENTRY = re.compile(rf"    ({_NAME}(?:, {_NAME})*): (.*)")


def public_modules() -> dict[str, str]:
    """Public name -> module, as `g2po_trl/__init__.py` has them."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULE_OF":
            return ast.literal_eval(node.value)
    raise LookupError("g2po_trl/__init__.py has no _MODULE_OF")


@functools.cache
def parsed(path: Path) -> dict[str, ast.stmt]:
    """The definitions of a file by name: classes, functions, and constants."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[ast.unparse(node.targets[0])] = node.value
    return found


def parameters(arguments: ast.arguments, bound: bool) -> list[str]:
    """Each parameter as it is written; without `self` or `cls` if `bound`."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(one, default) for one, default in zip(plain, defaults)][bound:]
    if arguments.vararg:
        found.append("*" + ast.unparse(arguments.vararg))
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return found + (["**" + ast.unparse(arguments.kwarg)] if arguments.kwarg else [])


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default else "")


def fields(node: ast.ClassDef, of_file: dict[str, ast.stmt]) -> dict[str, str]:
    """Name -> parameter, of a dataclass or a named tuple, with those it inherits from a class of its file."""
    bases = [of_file[ast.unparse(base)] for base in node.bases if ast.unparse(base) in of_file]
    found = {name: text for base in bases for name, text in fields(base, of_file).items()}
    if not node.decorator_list and "NamedTuple" not in map(ast.unparse, node.bases):
        return found
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not item.target.id.startswith("_"):
            default = item.value
            if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
                given = {keyword.arg: keyword.value for keyword in default.keywords}
                factory = ast.unparse(given["default_factory"]) if "default_factory" in given else ""
                empty = {"list": "[]", "dict": "{}"}.get(factory, "…" if factory else None)
                default = ast.Name(empty) if empty else given.get("default")
            equals = f" = {ast.unparse(default)}" if default is not None else ""
            found[item.target.id] = f"{item.target.id}: {ast.unparse(item.annotation)}{equals}"
    return found


def signature(node: Named, of_file: dict[str, ast.stmt], method: bool = False) -> str:
    """How it is called, on one line if that is at most WIDTH columns long."""
    returns, made = (
        "",
        next((one for one in getattr(node, "body", ()) if getattr(one, "name", "") == "__init__"), None),
    )
    if isinstance(node, ast.FunctionDef):
        given = parameters(node.args, bound=method)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    else:
        given = parameters(made.args, bound=True) if made else list(fields(node, of_file).values())
    given = [_readable(one, of_file) for one in given]
    line = f"{node.name}({', '.join(given)}){returns}"
    return (
        line if len(line) <= WIDTH else "\n".join([f"{node.name}(", *(f"    {one}," for one in given), f"){returns}"])
    )


def _readable(parameter: str, of_file: dict[str, ast.stmt]) -> str:
    """With double quotes, and the value of a constant whose name is private."""
    if (private := parameter.rpartition("= ")[2]).startswith("_") and private in of_file:
        parameter = parameter.replace(private, ast.unparse(of_file[private]))
    return parameter if '"' in parameter else parameter.replace("'", '"')


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] in ("property", "cached_property") for one in node.decorator_list)


def described(docstring: str, known: set[str]) -> list[str]:
    """A docstring as Markdown: its text, then arguments, what is returned, and errors."""
    lines, section = [], ""
    for line in inspect.cleandoc(docstring).splitlines():
        if head := re.fullmatch(r"(Args|Returns|Raises):", line):
            section = {"Args": "Arguments"}.get(head[1], head[1])
            lines += [f"**{section}**", ""]
        elif not section or not line:
            lines.append(line)
        elif found := ENTRY.fullmatch(line):
            names = ", ".join(f"`{name.strip('`')}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {found[2]}")
        elif lines[-1].startswith(("- ", "  ")) and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line.strip())
    return [line if line.startswith("    ") else linked(line, known) for line in lines]


def linked(line: str, known: set[str]) -> str:
    """Names of this page in code become links to them."""
    line = re.sub(r"\[(`\w+`)\]", r"\1", line)
    return re.sub(
        r"`(\w+)`", lambda found: f"[{found[0]}](#{found[1].lower()})" if found[1] in known else found[0], line
    )


def entry(name: str, modules: dict[str, str], known: set[str]) -> list[str]:
    """The Markdown of a class or a function."""
    module, _, local = name.rpartition(":")
    path = PACKAGE.joinpath(*(module or modules[name]).split(".")).with_suffix(".py")
    of_file = parsed(path)
    if (node := of_file.get(local)) is None:
        raise LookupError(f"{path} defines no {local}: correct SECTIONS")
    if not (docstring := ast.get_docstring(node, clean=False)):
        raise LookupError(f"{local} has no docstring: write one that is worth reading")
    lines = [f"### `{local}`", ""]
    if local.endswith("Config"):
        docstring = docstring.partition("\n    Args:")[0].replace(", and\n", ", and its own.\n")
        docstring += "\n\n    All fields: [configuration](configuration.md)."
    elif not local.endswith("Error"):
        lines += ["```py", signature(node, of_file), "```", ""]
    place = f"`g2po_trl.{module}.{local}` · " if module else ""
    lines += [f"{place}[source](../{path.relative_to(ROOT).as_posix()})", ""]
    lines += [*described(docstring, known - {local}), ""]
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        docstring = ast.get_docstring(method, clean=False)
        if docstring and (local not in METHODS or method.name in METHODS[local].split()):
            head = [f"#### `{local}.{method.name}`", ""]
            called = [] if is_property(method) else ["```py", signature(method, of_file, method=True), "```", ""]
            lines += [*head, *called, *described(docstring, known - {local}), ""]
    return lines


def page() -> str:
    """The page, as Markdown."""
    modules = public_modules()
    listed = [name for _, names in SECTIONS.values() for name in names.split()]
    if missing := set(modules) - set(listed):
        raise LookupError(f"SECTIONS lacks the public names {', '.join(sorted(missing))}")
    known = {name.rpartition(":")[2] for name in listed}
    lines = [HEAD]
    for title, (about, names) in SECTIONS.items():
        lines += [f"## {title}", "", about, ""]
        for name in names.split():
            lines += entry(name, modules, known)
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "Next: [Metrics](metrics.md).", ""]))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
