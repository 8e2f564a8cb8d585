"""A run's folder belongs to one run: who may write there, what a resume checks, leaves behind and writes down."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from letter_environment import LetterEnvironment, LongLetterEnvironment
from letter_trainer import TASKS, make_config, make_letter_trainer
from refusals import refused
from safetensors.torch import load_file

from g2po_trl import G2POConfig, PromptTemplate
from g2po_trl.cli.commands.evaluate import main as evaluate
from g2po_trl.runs.iterations import load_iterations
from g2po_trl.runs.output_dir import check_panel_name
from g2po_trl.runs.ownership import check_free, lock_folder
from g2po_trl.runs.run_json import identity_of, read_run
from g2po_trl.utils.errors import G2POError
from g2po_trl.view.data import Run

OPTIONS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "eval_dataset": TASKS}
OPTIONS |= {"gamma": 0.9, "max_turns": 7, "environment": LongLetterEnvironment}
LONGER = {**OPTIONS, "max_steps": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model_dir):
    """A finished run of three iterations: a checkpoint of each, an evaluation before and after, its model."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    trainer = make_letter_trainer(tiny_model_dir, folder, **OPTIONS)
    trainer.evaluate()  # writes files of the same run
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    trainer.close()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it where `make_trainer` writes."""
    return Path(shutil.copytree(trained, tmp_path / "out"))


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def names_in(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def test_another_run_is_refused_before_anything_is_lost(make_trainer, run):
    before = files_of(run)
    trainer = make_trainer(max_steps=1, eval_dataset=TASKS, eval_on_start=True)
    with refused("output_dir"):
        trainer.train()
    with pytest.warns(UserWarning, match="output_dir"):
        assert trainer.evaluate()["eval_success_rate"] >= 0
    with refused("output_dir"):
        trainer.train()
    assert files_of(run) == before


def test_a_start_that_fails_does_not_occupy_its_folder(make_trainer, tmp_path):
    """Nothing worth keeping is there: the corrected command works, and finds no trace of the failed one."""
    with pytest.raises(ValueError, match="beta"):
        make_trainer(max_steps=1, adam_beta1=-1.0, eval_dataset={"old": TASKS}).train()
    make_trainer(max_steps=1, eval_dataset={"new": TASKS}).train()
    assert read_run(tmp_path / "out")["trainer"]["adam_beta1"] > 0
    assert names_in(tmp_path / "out" / "panels") == ["new.jsonl"]


def test_overwrite_deletes_what_run_json_lists_and_nothing_else(make_trainer, run):
    mine = ["README.md", "checkpoint-best", "checkpoints.txt", "notes.txt"]
    for name in mine:
        (run / name).write_text("mine")
    (run.parent / "theirs").mkdir()
    described = json.loads((run / "run.json").read_text())
    described["written"] += ["../theirs", "..", "", "/x"]
    (run / "run.json").write_text(json.dumps(described))
    trainer = make_trainer(max_steps=1, overwrite=True)
    with pytest.warns(UserWarning, match="output_dir"):
        trainer.evaluate(TASKS)  # nothing is deleted for an evaluation; its line is written when training begins
    trainer.train()
    own = [".lock", "evaluations.jsonl", "log.jsonl", "run.json", "trajectories"]
    assert names_in(run) == sorted([*mine, *own]) and (run.parent / "theirs").is_dir()
    assert names_in(run / "trajectories") == ["train-000001.jsonl"]
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 1
    trainer.train()  # the same run goes on
    assert len(names_in(run / "trajectories", "train-*")) == 2


@pytest.mark.parametrize(
    ("added", "model", "field"),
    [
        ("checkpoint-7/", None, "output_dir"),
        ("run.json", None, "output_dir"),  # of another program
        (None, "checkpoint-1", "model_name_or_path"),
        (None, ".", "model_name_or_path"),
    ],
)
def test_overwrite_leaves_what_is_no_run_of_ours_and_the_model_it_trains(make_trainer, run, added, model, field):
    if added:
        (run / added).mkdir() if added.endswith("/") else (run / added).write_text("{}")
    before = files_of(run)
    with refused(field):
        make_trainer(max_steps=1, overwrite=True, model=model and run / model).train()
    with refused("overwrite"):
        check_free(run, "auto", overwrite=True)
    assert files_of(run) == before


def test_auto_where_there_is_no_checkpoint(make_trainer, run):
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        shutil.rmtree(run / name)
    with refused("output_dir"):
        make_trainer(**OPTIONS).train(resume_from_checkpoint="auto")  # it is finished, and would lose its model
    (run / "model.safetensors").unlink()
    with refused("output_dir"):
        make_trainer(**OPTIONS, seed=1).train(resume_from_checkpoint="auto")
    assert len(names_in(run / "trajectories", "train-*")) == 3
    make_trainer(**{**OPTIONS, "max_steps": 1}).train(resume_from_checkpoint="auto")  # stopped before its first
    assert names_in(run / "trajectories") == ["train-000001.jsonl"]


def test_a_checkpoint_of_another_run_is_not_resumed(make_trainer, run, tmp_path):
    described = json.loads((run / "run.json").read_text())
    state = json.loads((run / "checkpoint-3" / "g2po_state.json").read_text())
    assert described["run_id"] == state["run_id"] and len(described["run_id"]) == 32
    (run / "run.json").write_text(json.dumps({**described, "run_id": "another"}))
    before, trainer = files_of(run), make_trainer(**LONGER)
    for resume in ("auto", str(run / "checkpoint-2")):
        with refused("resume_from_checkpoint"):
            trainer.train(resume_from_checkpoint=resume)
    with refused("output_dir"):  # a refused resume has not made it this trainer's
        trainer.train()
    assert files_of(run) == before
    elsewhere = make_trainer(output="new", model=run, **LONGER)
    elsewhere.train(resume_from_checkpoint=str(run / "checkpoint-3"))  # into a free folder
    assert json.loads((tmp_path / "new" / "run.json").read_text())["run_id"] == described["run_id"]
    assert names_in(tmp_path / "new" / "trajectories", "train-*") == ["train-000004.jsonl"]


def test_a_resumed_run_keeps_its_settings(make_trainer, run):
    before = files_of(run)
    changed = {"gamma": 0.5, "max_turns": 4, "estimator_kwargs": {"edge_centric": False}, "warmup_steps": 1}
    trainer = make_trainer(**{**OPTIONS, **changed, "environment": LetterEnvironment})
    trainer.setup.prompt_template = PromptTemplate("{observation}!", "{observation}")
    with refused("resume_from_checkpoint") as error:
        trainer.train(resume_from_checkpoint="auto")
    for field in (*changed, "prompt.first", "environment", "estimator"):
        assert f"{field} was " in str(error.value)
    assert files_of(run) == before
    may = {"max_steps": 2, "save_total_limit": 5, "eval_temperature": 0.7, "num_environment_workers": 1}
    may |= {"per_device_eval_batch_size": 2, "max_tokens_per_micro_batch": 512, "logging_steps": 2}
    # From an earlier checkpoint: what was written later is another continuation's.
    make_trainer(**{**OPTIONS, **may}).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert names_in(run, "*checkpoint-*") == [
        *("checkpoint-1", "checkpoint-2", "superseded-checkpoint-2", "superseded-checkpoint-3")
    ]
    assert names_in(run / "trajectories") == ["eval-000000.jsonl", "train-000001.jsonl", "train-000002.jsonl"]
    assert {path.name for path in run.iterdir()} <= {*read_run(run)["written"], "README.md", ".lock"}


def test_every_setting_of_a_resumed_run_is_compared_unless_its_metadata_say_resumable(tmp_path):
    """Also a field that a later version adds."""

    def compared(**options):
        return identity_of({"trainer": {**make_config(tmp_path, **options).to_dict(), "new": 1}}, resumable)

    resumable = G2POConfig.fields_with("resumable")
    names = {"new", "gamma", "temperature", "seed", "learning_rate", "generation_batch_size", "bf16"}
    assert names <= compared().keys() and compared(eval_strategy="steps", eval_steps=1) == compared()


HOLD = (
    "import os, sys, time; from g2po_trl.runs.ownership import lock_folder; lock = lock_folder(sys.argv[1], 'o');"
    "child = os.fork(); child or time.sleep(600); print(child, flush=True); sys.stdin.read()"
)


def test_one_process_at_a_time(make_trainer, tmp_path):
    """The lock goes with its process, whatever its children do."""
    out, pipe = tmp_path / "out", subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLD, out], stdin=pipe, stdout=pipe, text=True)
    child = int(holder.stdout.readline())
    try:
        trainer = make_trainer(max_steps=1)
        with refused("output_dir"):
            trainer.train()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        trainer.train()
    finally:
        os.kill(child, signal.SIGKILL)
    lock_folder(out, "output").release()  # `train` has given it back


def test_an_evaluation_leaves_a_runs_folder_alone(run):
    before = files_of(run)
    with pytest.raises(G2POError, match="--output"):
        evaluate(["--model", str(run), "--overwrite", "--output", str(run)])
    assert files_of(run) == before


def test_names_of_panels_that_would_be_other_files(make_trainer):
    for name in ("train", "replaced", "seen/easy", "../../escaped", "..", "a\\b", "", "a\nb"):
        with refused("metric_key_prefix"):
            check_panel_name(name)
    check_panel_name("eval_unseen 2.0")
    for names in (["../x"], ["a", "a_t1"]):  # the second is that of a at temperature 1
        with refused("eval_dataset"):
            make_trainer(eval_dataset=dict.fromkeys(names, TASKS), other_eval_temperatures=[1.0])


def test_a_line_that_is_not_complete_is_left_out_and_counted(run):
    trajectories, log = run / "trajectories" / "train-000003.jsonl", run / "log.jsonl"
    content, shown = trajectories.read_bytes(), Run(run)
    trajectories.write_bytes(content[:-200])
    log.write_bytes(log.read_bytes()[:-100])
    assert len(shown.overview()["curves"]) == 3
    assert [shown.iteration(number)["unfinished"] for number in (2, 3)] == [0, 1]
    assert load_iterations(run)[2].unfinished == 1
    trajectories.write_bytes(content[:200] + b"\n" + content[-200:])
    with refused("trajectories"):
        shown.iteration(3)
    (run / "run.json").write_text('{"trainer":')
    with refused("run.json"):
        Run(run)


def test_a_full_disk_leaves_what_was_complete_and_what_followed_counts_once(make_trainer, run):
    """The files of a run may be 60 kB, and its weights are larger. Two processes had played iteration 4 before."""
    path, played = run / "evaluations.jsonl", run / "trajectories"
    before = path.read_text().splitlines()
    path.write_text(before[0] + "\n" + before[1][:-100])  # cut
    for rank in (0, 1):
        shutil.copy(played / "train-000003.jsonl", played / f"train-000004-rank{rank}.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = make_trainer(**LONGER)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        for write in (lambda: trainer.train(resume_from_checkpoint="auto"), trainer.save_model):
            with refused("output_dir"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((run / "unfinished-checkpoint").rglob("*.safetensors"))
    assert load_file(run / "model.safetensors") and load_file(run / "checkpoint-3" / "model.safetensors")
    make_trainer(**LONGER).train(resume_from_checkpoint="auto")
    assert (run / "checkpoint-4").is_dir() and path.read_text().splitlines() == before[:1]
    assert names_in(played, "train-000004*") == ["train-000004.jsonl"]
    assert [sum(map(len, iteration.groups)) for iteration in load_iterations(run)] == [8, 8, 8, 8]
