"""A coding agent to start from: it corrects a small repository whose tests fail. Turn it into your own."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from g2po_trl import Workspace

HERE = Path(__file__).resolve().parent
RULES = "The tests fail. Find the mistake in the code, correct it, and run the tests."
PASSED = "all tests pass"
SECONDS = 10  # that the tests may take
RESULTS = {}  # of the tests, by the state of a workspace


def tool(name, description, **types):
    schema = {"type": "object", "properties": {key: {"type": one} for key, one in types.items()}}
    schema["required"] = list(types)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("list", "List the files."),
    tool("read", "Open a file.", file="string"),
    tool("edit", "Replace a text in a line of the open file.", line="integer", old="string", new="string"),
    tool("undo", "Take the last edit back."),
    tool("test", "Run the tests."),
]


class Desk:
    """A repository with its open file, its edits, and what the tests said after each."""

    def __init__(self, workspace):
        self.workspace, self.file, self.note = workspace, None, ""
        self.edits, self.results, self.undone = [], [self.run_tests()], set()

    def use(self, name, arguments):
        """Call a tool as the model asks; a call that fails changes nothing."""
        tools = {"list": self.list, "read": self.read, "edit": self.edit, "undo": self.undo, "test": self.test}
        try:
            self.note = tools[name](**json.loads(arguments)) or ""
        except (LookupError, TypeError, ValueError) as error:
            self.note = f"This call failed: {error}"

    def list(self):
        return " ".join(sorted(path.name for path in self.workspace.folder.glob("*.py")))

    def read(self, file):
        if file not in self.list().split():
            raise ValueError(f"there is no {file}")
        self.file = self.workspace.folder / file

    def edit(self, line, old, new):
        text = self.file.read_text() if self.file else ""
        lines, line = text.splitlines(keepends=True), int(line)  # some parsers of calls leave numbers as text
        if line < 1 or old not in lines[line - 1]:
            raise ValueError(f"line {line} has no {old}")
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        self.file.write_bytes("".join(lines).encode())
        self.edits.append((self.file, text, f"line {line}: {old} is now {new}"))
        self.results.append("not tested")

    def undo(self):
        file, text, edit = self.edits.pop()
        file.write_text(text)
        self.results.pop()
        self.undone.add(f"undone: {edit}")

    def test(self):
        self.results[-1] = self.run_tests()

    def run_tests(self):
        self.workspace.restore(["test_*.py"])  # the agent cannot change them
        files = self.workspace.state()
        if files not in RESULTS:  # of the same files, the result is the same
            command = [sys.executable, "-S", str(HERE / "run_tests.py")]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            try:
                done = subprocess.run(command, cwd=self.workspace.folder, timeout=SECONDS, **pipes)
                RESULTS[files] = done.stdout.decode(errors="replace").strip()
            except subprocess.TimeoutExpired:  # the model's mistake, and no end of the episode
                return f"the tests take more than {SECONDS} s"
        return RESULTS[files]

    def look(self):
        """Return all that the model has to know, since it sees no earlier messages."""
        result, _, ran = self.results[-1].partition("\nran ")
        shown = []
        for number, line in enumerate(self.file.read_text().splitlines() if self.file else [], 1):
            mark = ">" if f"{self.file.name}:{number}" in ran.split() else ""  # the failing test runs this line
            shown += [f" {number}{mark} {line}"] if line else []
        shown += [*sorted(self.undone), self.note, *(edit[-1] for edit in self.edits), result]
        return "\n".join(filter(None, shown))


def repair(task, client):
    """Play one task, a line of tasks.jsonl, and return the reward: whether the tests pass."""
    model = client.openai()
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Workspace(HERE / "repositories" / task["repository"], Path(folder, "workspace")))
        client.works_on(desk.workspace)  # equal files and messages are one state
        for _ in range(client.max_turns):
            messages = [{"role": "system", "content": RULES}, {"role": "user", "content": desk.look()}]
            answer = model.chat.completions.create(model=client.model, messages=messages, tools=TOOLS)
            for call in answer.choices[0].message.tool_calls or []:
                desk.use(call.function.name, call.function.arguments)
            if desk.results[-1] == PASSED:
                break
        return desk.results[-1] == PASSED, None, {"diff": desk.workspace.diff()}


# Of `g2po teach`: texts that may be wrong, and what may be right.
GUESSES = {
    "+=": ["-="], "-=": ["+="], "==": ["!="], "!=": ["=="], "<=": ["<", ">="], ">=": [">", "<="], "<": ["<="],
    ">": [">="], "//": ["/"], "/": ["//"], "*": ["+"], "+": ["-", "*"], "-": ["+"], " - 1": ["", " + 1"], "0": ["1"],
    "1": ["0"], " and ": [" or "], " or ": [" and "], " not in ": [" in "], " in ": [" not in "], "if not ": ["if "],
}  # fmt: skip
PATTERN = re.compile("|".join(map(re.escape, sorted(GUESSES, key=len, reverse=True))))


CARE = 0.4  # how often the expert looks at what it is shown, before it guesses


def guesses(seen, careful):
    """Return what may be wrong: texts that replace a text of a line, by line and text."""
    found = {}
    for line, ran, text in re.findall(r"^ (\d+)(>?) (.*)", seen, re.M):
        for old in PATTERN.findall(text) if not text.lstrip().startswith(("def ", "for ")) else ():
            new = [new for new in GUESSES[old] if f"undone: line {line}: {old} is now {new}\n" not in seen]
            if not careful or (ran and new):
                found[int(line), old] = new if careful else GUESSES[old]
    return found


def expert(messages, tools, rng):
    """Return an expert's next call: it knows the tools, and guesses what is wrong."""
    seen = messages[-1]["content"]
    if not re.search(r"^ \d", seen, re.M):
        found = re.search(r"^(\w+\.py) test_", seen, re.M)
        return {"name": "read", "arguments": {"file": found[1]}} if found else {"name": "list", "arguments": {}}
    if seen.endswith("not tested"):
        return {"name": "test", "arguments": {}}
    if re.search("^line .* is now ", seen, re.M):
        return {"name": "undo", "arguments": {}}
    found = guesses(seen, careful=rng.random() < CARE) or guesses(seen, careful=False)
    line, old = rng.choice(sorted(found))
    return {"name": "edit", "arguments": {"line": line, "old": old, "new": rng.choice(found[line, old])}}
