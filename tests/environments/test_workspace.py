"""Folders that agents work on: copies, states, diffs, what is put back, and limits."""

import os
import shutil
import sys

import psutil
import pytest
from scripted_agents import play, says

from g2po_trl import AgentCommand
from g2po_trl.environments.agents.workspace import MAX_DIFF_CHARACTERS, Workspace
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


@pytest.mark.parametrize("pattern", ["tests", "tests/*", "tests/check.py", "tests/"])
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


def test_the_folder_itself_does_not_change(command, source):
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    _, end = play(command(), [says("rm -rf * && touch mine"), says("done")])
    assert end.reward == 0.0 and "No module named" in end.info["verify"]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_what_is_put_back_cannot_be_cheated_with(command):
    cheat = [says("echo > tests/check.py"), says("done")]
    assert [play(command(restore=restore), cheat)[1].reward for restore in ((), ["tests"])] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("verify", "reward"),
    [
        ("python -c 'print(0.25)'", 0.25),
        ("python -c 'print(\"nan\")'", 1.0),
        ("false", 0.0),
        (lambda folder: (folder / "add.py").stat().st_size, 32),
    ],
)
def test_rewards(command, verify, reward):
    _, end = play(command(verify), [says("done")])
    assert end.reward == reward and end.info["diff"] == ""


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


def test_a_column_chooses_the_workspace(command, source):
    _, end = play(command(workspace=f"{source.parent}/{{name}}"), [says("done")], name="source")
    assert end.info["diff"] == ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"workspace": None}, "verify"),
        ({"workspace": None, "verify": lambda: 1, "restore": ["tests"]}, "restore"),
        ({"workspace": "{a.b}"}, "workspace"),
        ({"verify_timeout": 0}, "verify_timeout"),
        ({"max_processes": 0}, "max_processes"),
        ({"max_disk_mb": -1}, "max_disk_mb"),
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
        ("<object at 0x7f3a22>", "<object at <id>>"),
        ("/tmp/abc/x.py:3: error", "<path>:3: error"),
        ("in /work/copy/a.py", "in ./a.py"),
        (
            "a.py:12:30: decade, facade 1234567; line 10; May 5 apples",
            "a.py:12:30: decade, facade 1234567; line 10; <date> apples",
        ),
    ],
)
def test_what_never_recurs_is_marked(text, marked):
    assert without_noise(text, "/work/copy") == marked


def test_who_is_asked_is_part_of_the_state():
    news = [{"role": "user", "content": "ok"}]
    keys = [
        workspace_key("files", [*system, *news], tools, "/work/copy")
        for system, tools in [
            ([], None),
            ([], [{"type": "function", "function": {"name": "a"}}]),
            ([{"role": "system", "content": "Today is 2026-11-27, in /work/copy"}], None),
            ([{"role": "system", "content": "Today is 2027-01-01, in ."}], None),
        ]
    ]
    assert len(set(keys)) == 3 and keys[2] == keys[3]
