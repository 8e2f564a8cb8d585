"""Runs that are killed and continued end where an uninterrupted one ends, bit for bit."""

import json
import os
import random
import shutil
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import programs
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import TrainerState

from g2po_trl.runs.checkpoint import STAGING, AtomicCheckpoint, RunState, find_checkpoint
from g2po_trl.utils.images import as_picture, read_png
from g2po_trl.utils.ranks import on_main

SCRIPT = Path(__file__).parents[1] / "helpers" / "resume_script.py"
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def start(tiny_model_dir):
    """Start the script with an output folder; what it prints is in `log` beside it."""

    def start(run, resume="auto", **environment):
        log, env = run.parent / "log", {**os.environ, **environment}
        return programs.start(SCRIPT, tiny_model_dir, run, resume, stdout=log, env=env)

    return start


def ended(process, run, *codes):
    code = process.wait(timeout=240)
    assert code in (codes or [0]), (run.parent / "log").read_text()[-3000:]
    return code


def killed_after(process, run, step, seconds):
    """SIGKILL `seconds` after the checkpoint appeared; returns whether the run was still on."""
    deadline = time.monotonic() + 240
    while not (run / f"checkpoint-{step}").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(seconds)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    return ended(process, run, 0, -signal.SIGKILL) != 0


def written(run):
    """The model, the evaluations and the log without times; transformers' mean loss begins anew with a process."""
    state = json.loads((run / "checkpoint-24" / "trainer_state.json").read_text())
    logs = [{k: v for k, v in one.items() if "time" not in k and "loss" not in k} for one in state["log_history"]]
    weights = {name: one.tolist() for name, one in load_file(run / "model.safetensors").items()}
    return weights, (run / "evaluations.jsonl").read_text(), logs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended(start(run), run)
    return run


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_again_and_again_and_continued(uninterrupted, start, tmp_path, times):
    run, rng, newest = tmp_path / "run", random.Random(0), 0
    for _ in range(times):
        step, moment = newest + rng.randint(1, 3), rng.uniform(0, 0.25)  # saving, rolling out, updating: whatever
        assert killed_after(start(run), run, step, moment)
        newest = max(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))
        assert newest >= step
    ended(start(run), run)
    assert written(run) == written(uninterrupted)
    assert (tmp_path / "log").read_text().count("Resuming from") == times


def test_killed_while_it_saves(uninterrupted, start, tmp_path):
    """A checkpoint that was not finished has no checkpoint's name, and the run goes on from the one before."""
    run = tmp_path / "run"
    ended(start(run, KILL_WHEN_SAVING="5"), run, -signal.SIGKILL)
    assert (run / STAGING / "checkpoint-5" / "model.safetensors").is_file()
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 3, 4)]
    ended(start(run, "latest"), run)
    assert not (run / STAGING / "checkpoint-5").exists()
    assert written(run) == written(uninterrupted)


def test_a_finished_run_is_not_trained_further(uninterrupted, start, tmp_path):
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    ended(start(run, "latest", MAX_STEPS="22"), run)
    ended(start(run, "latest"), run)
    assert not (run / "checkpoint-25").exists()
    assert written(run) == written(uninterrupted)


def test_epochs_have_orders_of_their_own(uninterrupted):
    """Three epochs of four iterations: all tasks in each, in another order."""
    files = sorted((uninterrupted / "trajectories").glob("train-*.jsonl"))
    tasks = [[json.loads(line)["task_id"] for line in path.open()][::4] for path in files]
    epochs = [sum(tasks[i : i + 4], []) for i in range(0, 12, 4)]
    assert len(tasks) == 12 and all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_step_samples_survive_a_checkpoint(tmp_path):
    picture, items = as_picture(np.zeros((4, 4, 3), np.uint8)), torch.tensor(7)
    mini_batches = [
        [{"ids": torch.arange(6).view(2, 3), "loss_scale": 1.5, "weight": 3, "items": items}],
        [{"ids": torch.zeros(0, 2), "items": items}, {"ids": torch.ones(1), "images": [[picture, picture], []]}],
    ]
    RunState({}, rank=1).save(tmp_path, {}, mini_batches)
    loaded = RunState({}, rank=1).restore(tmp_path, {})
    images = loaded[1][1].pop("images")
    assert images == mini_batches[1][1].pop("images") and images[0][1].png == picture.png
    left = weakref.ref(read_png(as_picture(np.ones((4, 4, 3), np.uint8)).png))
    assert left() is None, "no image stays in memory"
    torch.testing.assert_close(loaded, mini_batches, rtol=0, atol=0)
    assert RunState({}).restore(tmp_path, {}) == []


def test_an_error_at_the_start_is_raised_as_it_is():
    with pytest.raises(KeyError):  # on other ranks its text
        on_main(Accelerator(cpu=True), lambda: {}["x"])


def test_which_checkpoint(tmp_path):
    for nothing in (None, False, "auto", "false"):
        assert find_checkpoint(nothing, tmp_path) is None
    for missing in ("latest", str(tmp_path / "nowhere")):
        with refused("resume_from_checkpoint"):
            find_checkpoint(missing, tmp_path)
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / STAGING / "checkpoint-11").mkdir(parents=True)
    for latest in (True, "latest", "auto"):
        assert find_checkpoint(latest, tmp_path) == str(tmp_path / "checkpoint-10")
    assert find_checkpoint(str(tmp_path / "checkpoint-9"), tmp_path) == str(tmp_path / "checkpoint-9")
    with refused("resume_from_checkpoint"):
        RunState({}).restore(tmp_path / "checkpoint-9", {})


def test_a_file_that_is_cut_or_changed_is_named_with_the_checkpoint_before(make_trainer, tmp_path):
    make_trainer(max_steps=2, **SAVED).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    trainer = make_trainer(max_steps=3, **SAVED)
    for file in sorted({*checkpoint.iterdir()} - {checkpoint / "file_digests.json"}):
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            file.write_bytes(damaged)
            with refused("resume_from_checkpoint") as error:
                trainer.train(resume_from_checkpoint="auto")
            assert file.name in str(error.value) and "checkpoint-1" in str(error.value)
        file.write_bytes(whole)
    (checkpoint / "optimizer.pt").unlink()
    with refused("resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint="auto")
    (checkpoint / "file_digests.json").write_text("{")
    with refused("file_digests.json"):
        trainer.train(resume_from_checkpoint="auto")


def test_a_run_on_other_tasks_or_without_its_optimizer_is_not_continued(make_trainer, tmp_path):
    make_trainer(max_steps=1, **SAVED).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    other = Dataset.from_list([{"seed": seed} for seed in range(8, 16)])
    with refused("resume_from_checkpoint"):
        make_trainer(dataset=other, max_steps=2, **SAVED).train(resume_from_checkpoint=True)
    for path in (checkpoint / "file_digests.json", *checkpoint.glob("rng_state*.pth")):  # as save_only_model leaves it
        path.unlink()
    with refused("resume_from_checkpoint"):
        make_trainer(max_steps=2, **SAVED).train(resume_from_checkpoint="auto")


def test_the_oldest_checkpoints_go_by_their_steps(tmp_path):
    """After the clock was put back, the newest ones have the earliest times."""
    args, state = SimpleNamespace(should_save=True, save_total_limit=2), TrainerState()
    for state.global_step in (10, 20, 30):
        with AtomicCheckpoint().checkpoint(tmp_path, state, Accelerator(cpu=True), args) as folder:
            folder.mkdir(parents=True)
        os.utime(tmp_path / f"checkpoint-{state.global_step}", (1e9 - state.global_step,) * 2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-20", "checkpoint-30"]


def test_a_run_that_is_resumed_keeps_its_date(make_trainer, tiny_model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = "{{ strftime_now('%Y') }} " + tokenizer.chat_template
    options = {"model": AutoModelForCausalLM.from_pretrained(tiny_model_dir), "processing_class": tokenizer, **SAVED}
    make_trainer(max_steps=1, chat_template_kwargs={"strftime_now": "2001-02-03"}, **options).train()
    resumed = make_trainer(max_steps=2, **options)
    resumed.train(resume_from_checkpoint="auto")
    played = (tmp_path / "out" / "trajectories" / "train-000002.jsonl").read_text().splitlines()
    assert tokenizer.decode(json.loads(played[0])["steps"][0]["prompt_ids"]).startswith("2001 ")
