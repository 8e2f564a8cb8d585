"""What workers get from the trainer, and what not; which of them plays what."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from toy_environments import KeyDoorEnvironment

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.pool import place_groups


class Surroundings(TextEnvironment):
    """Tells what a program that it starts is told."""

    def reset(self):
        command = "import json, os, sys; print(json.dumps([sys.path, dict(os.environ)]))"
        text = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
        return Observation(text, state_key=os.environ.get("OPENAI_API_KEY", ""))

    def step(self, action):
        return StepResult(os.environ[action])


def test_programs_an_environment_starts_get_neither_the_trainers_path_nor_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), tmp_path, *sys.path])  # Python skips what is no text
    monkeypatch.delenv("PYTHONPATH", raising=False)
    kept = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"}
    harmless = {"LC_TIME", "CURL_CA_BUNDLE", "TOKENIZERS_PARALLELISM"}
    for name in (*kept, *harmless, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "true")
    with EnvironmentPool(Surroundings, PoolLimits(1, environment_variables=["OPENAI_API_KEY"])) as pool:
        (seen,) = pool.reset([{}])
        path, variables = json.loads(seen.text)
        assert str(tmp_path) not in path and "PYTHONPATH" not in variables
        assert not kept & set(variables) and harmless <= set(variables)
        assert variables["OPENAI_API_KEY"] == seen.state_key == "true"
        asked = pool.step({0: "HF_TOKEN"})[0]
        assert asked.kind == "exception" and "workers do not get HF_TOKEN" in asked.message


def test_a_worker_that_cannot_be_started_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with EnvironmentPool(KeyDoorEnvironment, PoolLimits(1)) as pool:
        with monkeypatch.context() as without:
            without.setattr(sys, "executable", str(tmp_path / "no-python"))
            before = len(os.listdir("/dev/fd"))
            with pytest.raises(OSError) as told:
                pool.reset([{}])
            # `told` holds on to everything that was local then, as an interactive session does.
            assert len(os.listdir("/dev/fd")) == before and os.listdir(tmp_path) == [] and told.value.errno
        assert isinstance(pool.reset([{}])[0], Observation), "the pool goes on"


def test_groups_are_cut_into_equal_parts():
    assert place_groups([5, 5, 5, 2, 2, 7], [0, 0]) == [0, 0, 0, 1, 1, 1]
    assert place_groups([0] * 8, [0] * 8) == list(range(8)) and place_groups([0] * 3, [0] * 8) == [0, 1, 2]
    assert place_groups([0, 1] * 4, [0] * 4) == [0, 2, 0, 2, 1, 3, 1, 3]
    assert place_groups([0, 0], [3, 1, 3]) == [1, 1] and place_groups([], [0, 0]) == []


def test_a_task_that_a_socket_does_not_hold_arrives_whole():
    class Long(TextEnvironment):
        def reset(self, text):
            return Observation(text[-5:], state_key=str(len(text)))

    with EnvironmentPool(Long, PoolLimits(2)) as pool:
        (seen,) = pool.reset([{"text": "x" * 20_000_000 + "end"}])
    assert seen == Observation("xxend", state_key="20000003")
