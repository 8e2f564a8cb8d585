"""Folders that agents work on: copies, states, diffs, what is put back, and limits."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scripted_agents import ask, play, says

from g2po_trl import AgentCommand
from g2po_trl.agents import supervisor
from g2po_trl.agents.workspace import MAX_DIFF_CHARACTERS, Workspace
from g2po_trl.prompts.state_keys import without_noise, workspace_key
from g2po_trl.utils.errors import G2POError

# Runs each answer as a shell command, as coding agents do, until the model says "done".
AGENT = """
import json, os, subprocess, urllib.request

said, output = None, "begin"
while said != "done":
    body = json.dumps({"messages": [{"role": "user", "content": output}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
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
    (tmp_path / "agent.py").write_text(AGENT)
    return folder


@pytest.fixture
def command(source, tmp_path):
    def made(verify="python -m tests.check", workspace=source, **options):
        return AgentCommand(["python", str(tmp_path / "agent.py")], verify, workspace=workspace, **options)

    return made


def test_copies_have_one_state(source, tmp_path):
    one, other = (Workspace(source, tmp_path / name) for name in ("one", "other"))
    assert one.state() == other.state() and one.diff() == ""
    (one.folder / "__pycache__").mkdir()
    (one.folder / "__pycache__" / "add.pyc").write_text("cached")
    assert one.state() == other.state(), "caches are no part of it"
    (one.folder / "add.py").write_text("def add(a, b):\n    return a + b\n")
    changed = one.state()
    assert changed != other.state()
    shutil.copy2(source / "add.py", one.folder / "add.py")
    assert one.state() == other.state()
    (one.folder / "add.py").chmod(0o755)
    (other.folder / "link").unlink()
    (other.folder / "link").symlink_to("data")
    assert len({changed, one.state(), other.state()}) == 3


def git(folder, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", ["link", "worktree", "submodule"])
def test_what_leads_to_another_folder_is_copied(source, tmp_path, kind):
    (source / "link").unlink()
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        git(source, *words)
    given = tmp_path / "given"
    if kind == "link":
        given.symlink_to(source)
    elif kind == "worktree":
        git(source, "worktree", "add", "-q", "-b", "task", str(given))
    else:
        git(tmp_path, "init", "-q", "outer")
        git(tmp_path / "outer", "submodule", "add", "-q", str(source), "inner")
        given = tmp_path / "outer" / "inner"
    (given / "add.py").write_text("edited")
    before = git(given, "rev-parse", "HEAD"), git(given, "status", "--porcelain")
    workspace = Workspace(given, tmp_path / "copy")
    assert before == (git(workspace.folder, "rev-parse", "HEAD"), git(workspace.folder, "status", "--porcelain"))
    git(workspace.folder, "commit", "-aqm", "of the agent")
    (workspace.folder / "new.txt").write_text("new")
    assert before == (git(given, "rev-parse", "HEAD"), git(given, "status", "--porcelain"))
    assert (given / "add.py").read_text() == "edited" and not (given / "new.txt").exists()
    assert git(workspace.folder, "status", "--porcelain") == "?? new.txt\n"


def test_a_change_is_seen_however_soon_it_comes(source, tmp_path):
    workspace, seen = Workspace(source, tmp_path / "copy"), set()
    for text in "abcdefgh":  # of equal length, within a tick of the clock
        (workspace.folder / "add.py").write_text(text)
        seen.add(workspace.state())
    assert len(seen) == 8


def test_what_is_no_file_stops_nothing(source, tmp_path):
    workspace = Workspace(source, tmp_path / "copy")
    before = workspace.state()
    os.mkfifo(workspace.folder / "pipe")
    (workspace.folder / os.fsdecode(b"\xff.txt")).write_text("odd")
    with open(workspace.folder / "large", "wb") as file:
        file.truncate(2**40)  # sparse
    begin = time.monotonic()
    states = {before, workspace.state()}
    with open(workspace.folder / "large", "r+b") as file:
        file.write(b"1")
    assert len({*states, workspace.state()}) == 3
    assert "Binary file pipe" in workspace.diff() and "+++ b/\N{REPLACEMENT CHARACTER}.txt" in workspace.diff()
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("place", ["link", "none", "file"])
def test_a_folder_that_an_agent_replaced(source, tmp_path, place):
    """Nothing of another folder is read, removed, or written."""
    outside = tmp_path / "outside"
    (outside / "tests").mkdir(parents=True)
    (outside / "tests" / "mine.py").write_text("mine")
    (outside / "add.py").write_text("secret")
    workspace = Workspace(source, tmp_path / "copy")
    shutil.rmtree(workspace.folder)
    if place == "link":
        workspace.folder.symlink_to(outside)
    elif place == "file":
        workspace.folder.write_text("")
    assert workspace.state() and "-    return a - b" in workspace.diff() and "secret" not in workspace.diff()
    workspace.restore(["tests"])
    assert (workspace.folder / "tests" / "check.py").read_text() == (source / "tests" / "check.py").read_text()
    assert (outside / "tests" / "mine.py").read_text() == "mine" and len(list(outside.rglob("*"))) == 3


def test_what_is_put_back_takes_the_place_of_anything(source, tmp_path):
    workspace = Workspace(source, tmp_path / "copy")
    (workspace.folder / "tests" / "__pycache__").mkdir()
    (workspace.folder / "tests" / "__pycache__" / "check.cpython-311.pyc").write_text("planted")
    (workspace.folder / "add.py").unlink()
    (workspace.folder / "add.py").mkdir()
    (workspace.folder / "add.py" / "__main__.pyc").write_text("planted")
    workspace.restore(["add.py", "tests"])
    assert (workspace.folder / "add.py").is_file() and workspace.diff() == ""
    assert not list(workspace.folder.rglob("*.pyc"))
    shutil.rmtree(workspace.folder / "tests")
    os.mkfifo(workspace.folder / "tests")
    workspace.restore(["tests"])
    assert workspace.diff() == ""


def test_what_is_put_back_is_so_in_closed_folders(source, tmp_path):
    (source / "tests").chmod(0o555)
    workspace = Workspace(source, tmp_path / "copy")
    (workspace.folder / "tests").chmod(0o000)
    workspace.restore(["tests"])
    assert (workspace.folder / "tests").stat().st_mode & 0o700 == 0o700 and workspace.diff() == ""


def test_a_file_that_cannot_be_read_is_no_error(source, tmp_path, monkeypatch):
    """A folder may be listed, and its files closed: `chmod 600`."""
    workspace, lstat = Workspace(source, tmp_path / "copy"), os.lstat

    def closed(path, **options):
        if str(path).endswith("copy/add.py"):
            raise PermissionError(13, "closed")
        return lstat(path, **options)

    before = workspace.state()
    monkeypatch.setattr("os.lstat", closed)
    monkeypatch.setattr("pathlib.Path.lstat", closed)
    assert workspace.state() != before and workspace.diff() == "Binary file add.py differs\n"


def test_a_diff_takes_no_time_that_grows_with_the_square(source, tmp_path):
    table = [f"{number % 997}\n" for number in range(100_000)]
    (source / "table").write_text("".join(table))
    (source / "list").write_text("".join(f"{number}\n" for number in range(10_000)))
    workspace = Workspace(source, tmp_path / "copy")
    (workspace.folder / "list").write_text("".join(f"{number}{'!' * (number == 5000)}\n" for number in range(10_000)))
    begin = time.monotonic()
    assert workspace.diff().split("\n")[2:] == [
        *("@@ -4998,7 +4998,7 @@", " 4997", " 4998", " 4999", "-5000", "+5000!", " 5001", " 5002", " 5003", ""),
    ]
    (workspace.folder / "list").unlink()
    (workspace.folder / "table").write_text("".join([table[0], *table[:0:-1]]))
    assert len(workspace.diff()) > MAX_DIFF_CHARACTERS
    shutil.copy2(source / "list", workspace.folder / "list")
    assert "@@ -1,100000 +1,100000 @@" in workspace.diff()
    assert time.monotonic() - begin < 20


def test_a_diff_names_what_changed(source, tmp_path):
    workspace = Workspace(source, tmp_path / "copy")
    (workspace.folder / "add.py").write_text("def add(a, b):\n    return a + b")
    (workspace.folder / "data").unlink()
    (workspace.folder / "new.txt").write_text("one\u2028line\r\n")
    assert workspace.diff().split("\n") == [
        *("--- a/add.py", "+++ b/add.py", "@@ -1,2 +1,2 @@", " def add(a, b):", "-    return a - b"),
        *("+    return a + b", "\\ No newline at end of file", "Binary file data differs"),
        *("--- /dev/null", "+++ b/new.txt", "@@ -0,0 +1 @@", "+one\u2028line\r", ""),
    ]
    (workspace.folder / "new.txt").write_text("line\n" * 20_000)
    assert MAX_DIFF_CHARACTERS < len(workspace.diff()) < MAX_DIFF_CHARACTERS + 100


@pytest.mark.parametrize("pattern", ["tests", "tests/*", "./tests/check.py", "tests/", "**/check.py"])
def test_files_are_put_back_and_none_outside_is_touched(source, tmp_path, pattern):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "check.py").write_text("mine")
    workspace = Workspace(source, tmp_path / "copy")
    shutil.rmtree(workspace.folder / "tests")
    (workspace.folder / "tests").symlink_to(outside)
    (workspace.folder / "conftest.py").write_text("import os; os._exit(0)")
    workspace.restore([pattern, "conftest.py"])
    assert workspace.diff() == "" and (outside / "check.py").read_text() == "mine"


def test_the_workspace_is_the_state_and_verification_the_reward(command):
    script = [says("date; echo ok"), says("sed -i 's/a - b/a + b/' add.py; date; echo ok"), says("done")]
    seen, end = play(command(), script)
    assert (end.terminated, end.reward) == (True, 1.0)
    assert "-    return a - b\n+    return a + b\n" in end.info["diff"]
    keys = [one.state_key for one in seen]
    assert len(set(keys)) == 3 and keys[1].split('"news"')[1] == keys[2].split('"news"')[1], "times are no part of it"
    again, _ = play(command(), script)
    assert [one.state_key for one in again] == keys


def test_silence_is_a_state_where_files_have_changed(source, tmp_path):
    """Else a command without output would be the same state whatever was known before it."""

    def agent(task, client):
        workspace = Workspace(source, tmp_path / task["name"])
        client.works_on(workspace)
        messages, said = [{"role": "user", "content": "Mend it."}], ""
        while said != "done":
            said = ask(client, *messages).content
            made = subprocess.run(said, shell=True, text=True, capture_output=True, cwd=workspace.folder)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": made.stdout}]
        return 1.0

    script = ["cat add.py", "true", "true", "echo >> add.py", "true", "done"]
    seen, _ = play(agent, [says(text) for text in script], name="one")
    keys = [json.loads(one.state_key) for one in seen]
    assert len({one.state_key for one in seen}) == len(seen)
    assert keys[2]["news"].startswith("user: def add(a, b)") and keys[2]["news"].endswith("assistant: true\n\nuser: ")
    assert keys[4]["news"] == "user: " and keys[4]["files"] == keys[5]["files"] != keys[3]["files"]
    other, _ = play(agent, [says(text) for text in script[3:]], name="other")
    assert [one.state_key for one in other[1:]] == [one.state_key for one in seen[4:]]


@pytest.mark.parametrize(
    "silence",
    [
        "(Bash completed with no output)",
        "<system>Tool ran without output or errors</system>",
        "Chunk ID: d33d4{}\nWall time: 0.00{} seconds\nProcess exited with code 0\nOriginal token count: 0\nOutput:\n",
    ],
)
def test_silence_in_the_words_of_coding_agents(silence):
    """What came before it is known."""

    def key(*results):
        messages = [{"role": "user", "content": "Mend it."}]
        for number, result in enumerate(results):
            text = result.format(number, number)
            messages += [{"role": "assistant", "content": "ls"}, {"role": "user", "content": text}]
        return workspace_key("files", messages, None, "/srv/copy", since=1)

    assert key(silence) == key(silence) != key("a.py", silence) != key("b.py", silence)
    assert key("a.py", silence) == key("", "a.py", silence)


def test_the_folder_itself_does_not_change(command, source):
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    _, end = play(command(), [says("rm -rf * && touch mine"), says("done")])
    assert end.reward == 0.0 and "No module named" in end.info["verify"]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_what_is_put_back_cannot_be_cheated_with(command):
    cheat = [says("echo > tests/check.py"), says("done")]
    given = ((), ["tests"], [Path("tests")], Path("tests"))
    assert [play(command(restore=restore), cheat)[1].reward for restore in given] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("verify", "reward"),
    [
        ("python -c 'print(0.25)'", 0.25),
        ("python -c 'print(\"nan\")'", 0.0),
        ("python -c 'print(\"1e999\")'", 0.0),
        ("python -c 'print(7); exit(1)'", 0.0),
        ("false", 0.0),
        (lambda folder: (folder / "add.py").stat().st_size, 32),
    ],
)
def test_rewards(command, verify, reward):
    _, end = play(command(verify), [says("done")])
    assert end.reward == reward and end.info["diff"] == ""


PLANTED = {
    "settings": "echo 'import os; os._exit(0)' > conftest.py",
    "a module": "mkdir pytest && echo > pytest/__main__.py && touch pytest/__init__.py",
    "home": "mkdir -p $HOME && echo 'exit 0' > $HOME/passes",
    "cache": """python - <<'END'
import os, py_compile
seen, text = os.stat("tests/check.py"), open("tests/check.py").read()
open("tests/check.py", "w").write("#" * seen.st_size)
os.utime("tests/check.py", ns=(seen.st_atime_ns, seen.st_mtime_ns))
py_compile.compile("tests/check.py")
END""",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_does_not_pass(command, source, planted):
    """Settings and modules of tests, the program's home, and bytecode of a test that is put back."""
    (source / "tests" / "test_add.py").write_text("def test_add():\n    assert 0\n")
    verify = {"home": "sh -c '. $HOME/passes'", "cache": "python -m tests.check"}.get(planted, "python -m pytest -q")
    options = {"restore": ["tests/*.py"], "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1}}
    _, end = play(command(verify, **options), [says(PLANTED[planted]), says("done")])
    assert end.reward == 0.0, end.info


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("import os; os._exit(0)", 0.0),
        ("import atexit; atexit.register(print, '9 passed'); add = min", 0.0),
        ("import atexit; atexit.register(print, 1000); add = max", 1.0),
    ],
)
def test_what_tested_code_prints_decides_nothing(command, source, code, reward):
    """With the command of the documentation."""
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    (verify,) = re.findall(r"`(sh -c \"[^`]*pytest[^`]*)`", page.read_text())
    (source / "tests" / "test_add.py").write_text(
        "from add import add\n\ndef test_add():\n    assert add(1, 2) == 2\n"
    )
    options = {"restore": ["tests/*.py"], "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1}}
    _, end = play(command(verify, **options), [says(f'echo "{code}" > add.py'), says("done")])
    assert end.reward == reward, end.info


@pytest.mark.parametrize("ends", ["kill -9 $(ps -o ppid= -p $PPID)", "pkill -9 -f agent.py"])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons stay")
def test_a_program_that_kills_its_supervisor_leaves_nothing(command, ends):
    _, end = play(command("true"), [says(f"setsid sleep 61.38 & sleep 61.38 & {ends}")])
    assert end.terminated
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "61.38"]]


def test_links_of_the_copy_lead_to_the_copy_or_where_they_led(source, tmp_path):
    (tmp_path / "shared").write_text("shared")
    (source / "whole").symlink_to(source / "add.py")
    (source / "tests" / "up").symlink_to(source / "tests")
    (source / "out").symlink_to("../shared")
    (source / "out, too").symlink_to(tmp_path / "shared")
    (tmp_path / "far").mkdir()
    workspace = Workspace(source, tmp_path / "far" / "copy")
    leads = {name: os.readlink(workspace.folder / name) for name in ("link", "whole", "tests/up", "out", "out, too")}
    shared = str(tmp_path / "shared")
    assert leads == {"link": "add.py", "whole": "add.py", "tests/up": ".", "out": shared, "out, too": shared}
    assert workspace.diff() == ""
    (workspace.folder / "whole").write_text("changed")
    (workspace.folder / "tests" / "up").unlink()
    assert "a - b" in (source / "add.py").read_text() and "Binary file tests/up differs" in workspace.diff()
    workspace.restore(["tests", "whole"])
    assert os.readlink(workspace.folder / "tests" / "up") == "." and "tests/up" not in workspace.diff()


def test_git_of_the_copy_works_in_the_copy(source, tmp_path):
    for words in (["init", "-q"], ["config", "core.worktree", str(source)], ["add", "."], ["commit", "-qm", "one"]):
        git(source, *words)
    workspace = Workspace(source, tmp_path / "copy")
    (source / "add.py").write_text("edited")
    git(workspace.folder, "reset", "-q", "--hard")
    assert (source / "add.py").read_text() == "edited"


def test_home_and_temporary_files_are_of_the_episode(command, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "1")
    shown = 'python -c \'import os; print(*(os.environ[n] for n in ("HOME", "TMPDIR", "PWD", "EPISODE_FOLDER")))\''
    seen, _ = play(command("env"), [says(shown), says("done")])
    home, temporary, folder, episode = seen[1].text.removeprefix("user: ").split()
    assert [home, temporary, folder] == [f"{episode}/{name}" for name in ("home", "tmp", "workspace")]
    assert not os.path.exists(episode)


def test_a_command_that_verifies_has_no_key(command):
    _, end = play(command("env"), [says("done")])
    assert "EPISODE_FOLDER" in end.info["verify"] and "sk-g2po" not in end.info["verify"]


def test_a_command_that_verifies_ends(command):
    _, end = play(command("sleep 61.37", verify_timeout=0.2), [says("done")])
    assert end.reward == 0.0 and end.info["verify"] == "it took more than 0.2 s"


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
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "61.37"]]


def test_files_elsewhere_are_in_no_limit(command, tmp_path):
    _, end = play(
        command(verify="true", max_disk_mb=1), [says(f"head -c 3000000 /dev/zero > {tmp_path}/out"), says("done")]
    )
    assert end.reward == 1.0 and os.path.getsize(tmp_path / "out") == 3_000_000


@pytest.mark.parametrize("limit", [None, float("inf")])
def test_no_limit(command, limit):
    unlimited = command("true", max_disk_mb=limit, max_processes=limit, verify_timeout=limit and 60)
    _, end = play(unlimited, [says("sleep 0.7"), says("done")])
    assert end.reward == 1.0


def test_the_settings_of_the_user_are_not_the_programs(command, source, monkeypatch):
    for name in ("GIT_DIR", "XDG_CONFIG_HOME", "CODEX_HOME"):
        monkeypatch.setenv(name, str(source))
    seen, _ = play(command("true"), [says("env"), says("done")])
    assert str(source) not in seen[1].text


@pytest.mark.parametrize(
    ("verify", "match"),
    [
        ("no_such_program -q", "no_such_program is not found"),
        ("./none.sh", "./none.sh is not found"),
        ("/none/check", "/none/check is not found"),
        ("./add.py", "./add.py cannot be executed"),
    ],
)
def test_a_program_that_verifies_and_is_not_there_is_no_failure_of_the_model(command, verify, match):
    with pytest.raises(FileNotFoundError, match=match):
        play(command(verify=verify), [])


def test_a_program_that_verifies_and_is_removed_is_one(command, source):
    (source / "check.sh").write_text("#!/bin/sh\n")
    (source / "check.sh").chmod(0o755)
    rewards = [play(command("./check.sh"), [says(one), says("done")])[1].reward for one in ("true", "rm -r $PWD")]
    assert rewards == [1.0, 0.0]


def test_what_is_put_back_is_there(command):
    with pytest.raises(G2POError, match=r"restore is \['test'\], and no file of .*source' matches it"):
        play(command(restore=["test"]), [])


def test_a_workspace_beyond_the_limit_is_no_failure_of_the_model(command, source):
    (source / "data").write_bytes(bytes(range(256)) * 8000)
    with pytest.raises(G2POError, match="max_disk_mb"):
        play(command(max_disk_mb=1), [])


def test_a_folder_that_cannot_be_copied_is_named(command, source, monkeypatch):
    inside = source / "tmp"
    inside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(inside))
    with pytest.raises(G2POError, match="cannot be copied: .*into itself"):
        play(command(), [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons stay")
def test_many_processes_end():
    fork = "import os, time\nfor _ in range(600):\n if not os.fork():\n  os.setsid()\n  time.sleep(61.37)\n"
    limits = {"folder": "/nowhere", "processes": 100, "disk_bytes": 1}
    program = [sys.executable, "-S", "-c", f"{fork}time.sleep(61.37)"]
    words = [sys.executable, "-S", supervisor.__file__, json.dumps(limits), *program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b"LimitError" in process.stderr.read() and process.wait() == supervisor.OVER_LIMIT
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == program]


def test_a_column_chooses_the_workspace(command, source):
    _, end = play(command(workspace=f"{source.parent}/{{name}}"), [says("done")], name="source")
    assert end.info["diff"] == ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"workspace": None}, "verify"),
        ({"workspace": None, "verify": lambda: 1, "restore": ["tests"]}, "restore"),
        ({"workspace": "{a.b}"}, "workspace"),
        ({"restore": ["../tests"]}, "restore"),
        ({"restore": ["/tests"]}, "restore"),
        ({"verify_timeout": 0}, "verify_timeout"),
        ({"max_processes": 0}, "max_processes"),
        ({"max_disk_mb": -1}, "max_disk_mb"),
        ({"max_disk_mb": "9"}, "max_disk_mb"),
        ({"timeout": True}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_options_that_cannot_be(command, options, field):
    with pytest.raises(G2POError, match=field):
        command(**options)


def test_a_workspace_that_is_no_folder(tmp_path):
    with pytest.raises(G2POError, match="workspace"):
        Workspace(tmp_path / "none", tmp_path / "copy")


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("Chunk ID: d33d44 · Wall time: 0.0000 seconds", "Chunk ID: <id> · Wall time: <seconds>"),
        ("Fri Nov 27 11:09:32 UTC 2026", "<date>"),
        ("2026-11-27T10:00:00.123Z, 2026-11-27", "<date>, <date>"),
        ("3 passed in 0.12s", "3 passed in <seconds>"),
        ('duration_ms: 755, "wall_ms": 12, ms: 3', 'duration_ms: <seconds>, "wall_ms": <seconds>, ms: 3'),
        ("<object at 0x7f3a22>", "<object at <id>>"),
        ("/tmp/abc/x.py:3: error", "<path>:3: error"),
        ("in /srv/copy/a.py", "in ./a.py"),
        (
            "a.py:12:30: decade, facade 1234567; line 10; May 5 apples",
            "a.py:12:30: decade, facade 1234567; line 10; <date> apples",
        ),
    ],
)
def test_what_never_recurs_is_marked(text, marked):
    assert without_noise(text, "/srv/copy") == marked


def test_paths_of_the_episode_are_temporary_wherever_they_are():
    text = "in /scratch/episode-1/workspace/a.py: see /scratch/episode-1/home/.x, '/scratch/episode-1/tmp/1'"
    folder = "/scratch/episode-1/workspace"
    assert without_noise(text, folder, "/scratch/episode-1") == "in ./a.py: see <path>, '<path>'"


def test_tools_that_quote_a_temporary_path_have_a_key():
    tools = [{"type": "function", "function": {"name": "run", "description": f'e.g. `cat "/tmp/{n}"`'}} for n in "ab"]
    assert len({workspace_key("files", [{"role": "user", "content": "a"}], [tool], "/work") for tool in tools}) == 1


def test_who_is_asked_is_part_of_the_state():
    news = [{"role": "user", "content": "ok"}]
    keys = [
        workspace_key("files", [*system, *news], tools, "/srv/copy")
        for system, tools in [
            ([], None),
            ([], [{"type": "function", "function": {"name": "a"}}]),
            ([{"role": "system", "content": "Today is 2026-11-27, in /srv/copy"}], None),
            ([{"role": "system", "content": "Today is 2027-01-01, in ."}], None),
        ]
    ]
    assert len(set(keys)) == 3 and keys[2] == keys[3]
