"""`g2po view RUN --push-space`: the page as a static Space, and a Hub that refuses or is not reached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import fake_hub
from viewing import data_in

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.view import Run, Sources, write_page


@pytest.mark.parametrize("status", [200, 403])
def test_the_page_becomes_a_static_space_or_the_refusal_is_one_line(tmp_path, status):
    episodes = [Trajectory("t", [Step("Hall.", "go")], 10.0 * i, ("failure", "success")[i]) for i in (0, 1)]
    write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", episodes)
    command = [sys.executable, "-m", "g2po_trl", "view", str(tmp_path), "--push-space", "someone/graphs"]
    with fake_hub(status) as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_none", "HF_HUB_OFFLINE": "0"}
        settings |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120)
    page = (tmp_path / "view.html").read_bytes()
    if status == 200:
        assert run.returncode == 0 and "/someone/graphs" in run.stdout.splitlines()[-1], run.stderr
        assert hub.files.keys() == {"index.html", "README.md"} and hub.files["index.html"] == page
        assert "sdk: static" in hub.files["README.md"].decode()
        assert any(path.startswith("/api/spaces/someone/graphs/commit/") for path in hub.requests)
    else:
        assert run.returncode == 1 and len(run.stderr.splitlines()) == 1
        assert run.stderr.startswith("g2po view: error: push_space is 'someone/graphs': the page was not uploaded (")


def test_a_page_for_others_has_no_secrets(tmp_path):
    """An agent's traceback may name a key, and a folder of its user."""
    said = f"openai.AuthenticationError: sk-proj-abcdefghijklmnopqrst in {Path.home()}/project/agent.py"
    lost = Trajectory("t", [Step(f"Seen: {said}", "go")], 0.0, "error", error=said)
    write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", [lost])
    data = {}
    for public in (False, True):
        page = write_page(Sources(Run(tmp_path)), tmp_path / "view.html", public=public)
        data[public] = data_in(page)["iteration-1"]
    assert data[False].count("sk-proj") == 2 and data[False].count(str(Path.home())) == 2
    assert "sk-proj" not in data[True] and str(Path.home()) not in data[True] and "~/project/agent.py" in data[True]
