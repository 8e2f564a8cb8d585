"""Folders that agents work on: copies, states, diffs, what is put back, and limits."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from refusals import refused
from scripted_agents import ASKING, play, running, says

from g2po_trl import AgentCommand
from g2po_trl.agents.workspace import MAX_DIFF_CHARACTERS, Workspace

# Runs each answer as a shell command, as coding agents do, until the model says "done".
AGENT = f"""{ASKING}
said, output = None, "begin"
while said != "done":
    said = ask(output)
    output = subprocess.run(said, shell=True, text=True, capture_output=True).stdout
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "tests").mkdir(parents=True)
    (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "tests" / "check.py").write_text("from add import add\n\nassert add(1, 2) == 3\n")
    (folder / "data").write_bytes(b"\xff\0")
    (folder / "link").symlink_to("add.py")
    (tmp_path / "workspace_agent.py").write_text(AGENT)
    return folder


@pytest.fixture
def command(source, tmp_path):
    def made(verify="python -m tests.check", workspace=source, **options):
        return AgentCommand(["python", str(tmp_path / "workspace_agent.py")], verify, workspace=workspace, **options)

    return made


def test_copies_have_one_state(source, tmp_path):
    one, other = (Workspace(source, tmp_path / name) for name in ("one", "other"))
    assert one.state() == other.state() and one.diff() == ""
    (one.folder / "__pycache__").mkdir()
    (one.folder / "__pycache__" / "add.pyc").write_text("cached")
    assert one.state() == other.state(), "caches are no part of it"
    seen = {one.state()}
    for text in ("def add(a, b):\n    return a + b\n", "abc", "abd"):  # of equal length, within a tick of the clock
        (one.folder / "add.py").write_text(text)
        seen.add(one.state())
    shutil.copy2(source / "add.py", one.folder / "add.py")
    assert one.state() == other.state()
    (one.folder / "add.py").chmod(0o755)
    (other.folder / "link").unlink()
    (other.folder / "link").symlink_to("data")
    assert len({*seen, one.state(), other.state()}) == 6


def test_what_is_no_file_stops_nothing(source, tmp_path):
    workspace = Workspace(source, tmp_path / "copy")
    before = workspace.state()
    os.mkfifo(workspace.folder / "pipe")
    (workspace.folder / os.fsdecode(b"\xff.txt")).write_text("odd")
    with open(workspace.folder / "large", "wb") as file:
        file.truncate(2**40)  # sparse
    assert workspace.state() != before
    assert "File pipe differs" in workspace.diff() and "+++ b/\N{REPLACEMENT CHARACTER}.txt" in workspace.diff()


@pytest.mark.parametrize("place", ["link", "none", "file"])
def test_a_folder_that_an_agent_replaced(source, tmp_path, place):
    """Nothing of another folder is read, removed, or written."""
    outside, workspace = tmp_path / "outside", Workspace(source, tmp_path / "copy")
    (outside / "tests").mkdir(parents=True)
    (outside / "tests" / "mine.py").write_text("mine")
    (outside / "add.py").write_text("secret")
    shutil.rmtree(workspace.folder)
    if place == "link":
        workspace.folder.symlink_to(outside)
    elif place == "file":
        workspace.folder.write_text("")
    assert workspace.state() and "-    return a - b" in workspace.diff() and "secret" not in workspace.diff()
    workspace.restore(["tests"])
    assert (workspace.folder / "tests" / "check.py").read_text() == (source / "tests" / "check.py").read_text()
    assert (outside / "tests" / "mine.py").read_text() == "mine" and len(list(outside.rglob("*"))) == 3


@pytest.mark.parametrize("pattern", ["tests", "tests/*", "./tests/check.py", "tests/", "**/check.py"])
def test_what_is_put_back_takes_the_place_of_anything(source, tmp_path, pattern):
    """None of its caches stays, and nothing outside is touched."""
    outside, workspace = tmp_path / "outside", Workspace(source, tmp_path / "copy")
    outside.mkdir()
    (outside / "check.py").write_text("mine")
    add, tests = workspace.folder / "add.py", workspace.folder / "tests"
    add.unlink()
    add.mkdir()
    (add / "__main__.pyc").write_text("planted")
    for change in (lambda: tests.symlink_to(outside), lambda: os.mkfifo(tests)):
        shutil.rmtree(tests)
        change()
        (workspace.folder / "conftest.py").write_text("import os; os._exit(0)")
        workspace.restore([pattern, "add.py", "conftest.py"])
        assert workspace.diff() == "" and not list(workspace.folder.rglob("*.pyc"))
    assert (outside / "check.py").read_text() == "mine"


def test_a_diff_names_what_changed(source, tmp_path):
    (source / "table").write_text("".join(f"{number}\n" for number in range(10_000)))
    workspace = Workspace(source, tmp_path / "copy")
    (workspace.folder / "add.py").write_text("def add(a, b):\n    return a + b")
    (workspace.folder / "data").unlink()
    (workspace.folder / "new.txt").write_text("one\u2028line\r\n")
    (workspace.folder / "table").write_text("0\n" * 2**20)
    assert workspace.diff().split("\n") == [
        *("--- a/add.py", "+++ b/add.py", "@@ -1,2 +1,2 @@", " def add(a, b):", "-    return a - b"),
        *("+    return a + b", "\\ No newline at end of file", "File data differs"),
        *("--- /dev/null", "+++ b/new.txt", "@@ -0,0 +1 @@", "+one\u2028line\r", "File table differs", ""),
    ]
    (workspace.folder / "new.txt").write_text("line\n" * 20_000)
    assert MAX_DIFF_CHARACTERS < len(workspace.diff()) < MAX_DIFF_CHARACTERS + 100


def test_the_workspace_is_the_state_and_verification_the_reward(command):
    script = [says("date; echo ok"), says("sed -i 's/a - b/a + b/' add.py; date; echo ok"), says("done")]
    (seen, end), (again, _) = play(command(), script), play(command(), script)
    assert (end.terminated, end.reward) == (True, 1.0)
    assert "-    return a - b\n+    return a + b\n" in end.info["diff"]
    keys = [one.state_key for one in seen]
    assert len(set(keys)) == 3 and [one.state_key for one in again] == keys, "times are no part of it"


def test_files_that_are_ignored_are_no_part_of_states_and_diffs(command):
    written = "mkdir notes && touch .aider.tags notes/a b.log; echo ok"
    script = [says(text) for text in (written, "date > c.log; echo ok", "done")]
    seen, end = play(command("true", ignore=["*.log", "notes"]), script)
    assert len({json.loads(one.state_key)["files"] for one in seen}) == 1 and end.info["diff"] == ""


def test_a_verification_that_takes_too_long_is_an_error(command):
    """And no failure of the model, which may have done what it was asked for."""
    with pytest.raises(TimeoutError, match="verify"):
        play(command("sleep 61.39", verify_timeout=1), [says("done")])
    assert not running("61.39")


def test_the_folder_itself_does_not_change(command, source):
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    _, end = play(command(), [says("rm -rf * && touch mine"), says("done")])
    assert end.reward == 0.0 and "No module named" in end.info["verify"]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_what_is_put_back_cannot_be_cheated_with(command):
    cheat = [says("echo > tests/check.py"), says("done")]
    given = ((), ["tests"], Path("tests"))
    assert [play(command(restore=restore), cheat)[1].reward for restore in given] == [1.0, 0.0, 0.0]


def test_rewards(command, source):
    (source / "check.sh").write_text("#!/bin/sh\n")
    (source / "check.sh").chmod(0o755)
    for verify, said, reward in (
        ("false", "true", 0.0),
        (lambda folder: (folder / "add.py").stat().st_size, "true", 32),
        ("./check.sh", "true", 1.0),
        ("./check.sh", "rm -r $PWD", 0.0),
    ):
        _, end = play(command(verify, verify_timeout=2), [says(said), says("done")])
        assert end.reward == reward and (said != "true" or end.info["diff"] == "")


CACHE = """python - <<'END'
import os, py_compile
seen, text = os.stat("tests/check.py"), open("tests/check.py").read()
open("tests/check.py", "w").write("#" * seen.st_size)
os.utime("tests/check.py", ns=(seen.st_atime_ns, seen.st_mtime_ns))
py_compile.compile("tests/check.py")
END"""
EXITS = "import os; os._exit(0)"
(OF_THE_DOCS,) = re.findall(
    r"`(sh -c \"[^`]*pytest[^`]*)`", (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
)


@pytest.mark.parametrize(
    ("verify", "said", "reward"),
    [
        ("python -m pytest -q", f"echo '{EXITS}' > conftest.py; mkdir pytest && echo > pytest/__main__.py", 0.0),
        ("sh -c '. $HOME/passes'", "mkdir -p $HOME && echo 'exit 0' > $HOME/passes", 0.0),
        ("python -m tests.check", CACHE, 0.0),
        ("python -m tests.check", f"{CACHE}\nmv tests/__pycache__ $TMPDIR/c; ln -s $TMPDIR/c tests/__pycache__", 0.0),
        (OF_THE_DOCS, f"echo '{EXITS}' > add.py", 0.0),
        (OF_THE_DOCS, 'echo "add = max" > add.py', 1.0),
    ],
)
def test_what_is_planted_does_not_pass(command, source, verify, said, reward):
    """Settings and modules of tests, the program's home, bytecode of a test, and code that ends the tests."""
    test = "from add import add\n\ndef test_add():\n    assert add(1, 2) == 2\n"
    (source / "tests" / "test_add.py").write_text(test)
    strict = {"restore": ["tests/*.py"], "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1}}
    _, end = play(command(verify, **strict), [says(said), says("done")])
    assert end.reward == reward, end.info


@pytest.mark.parametrize("ends", ["kill -9 $(ps -o ppid= -p $PPID)", "pkill -9 -f {}/workspace_agent.py"])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons stay")
def test_a_program_that_kills_its_supervisor_leaves_nothing(command, tmp_path, ends):
    _, end = play(command("true"), [says(f"setsid sleep 61.38 & sleep 61.38 & {ends.format(tmp_path)}")])
    assert end.terminated
    assert not running("61.38")


def test_variables_of_the_program_and_of_what_verifies_it(command, source, monkeypatch):
    """Home, temporary files and settings are the episode's; what verifies has no key."""
    for name in ("GIT_CONFIG_GLOBAL", "XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.setenv(name, str(source))
    shown = 'python -c \'import os; print(*(os.environ[n] for n in ("HOME", "TMPDIR", "PWD", "EPISODE_FOLDER")))\''
    files = {".tool/settings": "$NONE $OPENAI_BASE_URL"}
    script = [says(text) for text in (shown, "env", "cat $HOME/.tool/settings; echo; echo $OPENAI_BASE_URL", "done")]
    seen, end = play(command("env", files=files), script)
    written, url = seen[3].text.removeprefix("user: ").splitlines()
    assert written == f"$NONE {url}"
    home, temporary, folder, episode = seen[1].text.removeprefix("user: ").split()
    assert [home, temporary, folder] == [f"{episode}/{name}" for name in ("home", "tmp", "workspace")]
    assert not os.path.exists(episode) and str(source) not in seen[2].text
    assert "EPISODE_FOLDER" in end.info["verify"] and "sk-g2po" not in end.info["verify"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
@pytest.mark.parametrize(
    ("action", "option", "reason"),
    [
        ("for i in $(seq 9); do sleep 61.37 & done; wait", {"max_processes": 6}, "processes"),
        ("for i in $(seq 9); do setsid sleep 61.37 & done; sleep 61.37", {"max_processes": 6}, "processes"),
        ("for i in 1 2 3; do head -c 900000 /dev/zero > $i; done; sleep 61.37", {"max_disk_mb": 2}, "MiB"),
    ],
)
def test_a_program_beyond_its_limits_is_a_failure(command, action, option, reason):
    _, end = play(command(**option), [says(action)])
    assert end.terminated and end.reward == 0 and end.info["success"] is False
    assert reason in end.info["failure_reason"] and "diff" in end.info
    assert not running("61.37")


@pytest.mark.parametrize(
    ("change", "options", "field"),
    [
        (lambda source: (source / ".git").write_text("gitdir: /elsewhere"), {}, "workspace"),
        (lambda source: (source / "out").symlink_to("../shared"), {}, "workspace"),
        (lambda source: [(source / n).symlink_to(to) for n, to in (("a", "."), ("b", "a/../c"))], {}, "workspace"),
        (lambda source: (source / ".venv").symlink_to(".."), {}, "workspace"),
        *((lambda source, n=n: (source / n).symlink_to(source / "add.py"), {}, "workspace") for n in ("a", "a.pyc")),
        (lambda source: (source / "b.pyc").symlink_to("/no/where"), {}, "workspace"),
        (lambda source: (source / "logs").symlink_to(".."), {"ignore": ["logs"]}, "workspace"),
        (shutil.rmtree, {}, "workspace"),
        (lambda source: None, {"restore": ["test"]}, "restore"),
        *((str, {"verify": name}, "verify") for name in ("no_such_program -q", "./none.sh", "./add.py")),
        (lambda source: (source / "data").write_bytes(bytes(range(256)) * 8000), {"max_disk_mb": 1}, "max_disk_mb"),
    ],
)
def test_what_is_refused_before_the_agent_asks(command, source, change, options, field):
    change(source)
    with refused(field):
        play(command(**options), [])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(({"command": command}, "command") for command in ("", "s {0}", "s {a.b}", "s {a", "'a")),
        ({"verify": lambda task, answer: 1}, "verify"),
        ({"verify": "true"}, "verify"),
        ({"restore": ["tests"]}, "restore"),
        *((given, "files") for given in ({"files": {"a": "b"}}, {"workspace": ".", "files": {"../a": "b"}})),
        *(({"workspace": ".", "restore": [pattern]}, "restore") for pattern in ("../tests", "/tests")),
        *(({"timeout": value}, "timeout") for value in (0, True, float("nan"))),
        *(({"max_disk_mb": value}, "max_disk_mb") for value in (-1, "9")),
    ],
)
def test_what_a_command_may_not_be(options, field):
    with refused(field):
        AgentCommand(**{"command": "solve", "verify": lambda: 1, **options})
