"""A run's folder belongs to one run: who may write there, what a resume checks, leaves behind and writes down."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from letter_environment import LetterEnvironment, LongLetterEnvironment
from letter_trainer import TASKS, make_config, make_letter_trainer

from g2po_trl.cli.recipe import starting_point
from g2po_trl.evaluation.evaluate import main as evaluate
from g2po_trl.report.analysis import load_iterations
from g2po_trl.report.summary import gamma_of, notes
from g2po_trl.runs.changes import changes, next_parts, settings_at
from g2po_trl.runs.output_dir import RunFolder, check_panel_name
from g2po_trl.runs.ownership import FolderLock, check_free, held, what_is_in
from g2po_trl.runs.run_json import read_run
from g2po_trl.utils.masking import HIDDEN
from g2po_trl.view.data import Run
from g2po_trl.view.server import make_server
from g2po_trl.view.sources import Sources, open_folder

OPTIONS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "eval_dataset": TASKS}
OPTIONS |= {"gamma": 0.9, "max_turns": 7, "environment": LongLetterEnvironment}


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


def test_another_run_is_refused_before_anything_is_lost(make_trainer, run):
    before = files_of(run)
    trainer = make_trainer(max_steps=1, eval_dataset=TASKS, eval_on_start=True)
    with pytest.raises(ValueError) as refused:
        trainer.train()
    for way in ("--resume_from_checkpoint auto", "--overwrite", "another --output_dir", "run.json", "checkpoint-3"):
        assert way in str(refused.value)
    with pytest.warns(UserWarning, match="holds another run: this evaluation is not written there"):
        assert trainer.evaluate()["eval_success_rate"] >= 0
    with pytest.raises(ValueError, match="holds another run"):
        trainer.train()
    assert files_of(run) == before


def test_overwrite_deletes_what_a_run_wrote_and_nothing_else(make_trainer, run):
    (run / "notes.txt").write_text("mine")
    (run / "README.md").write_text("mine")
    (run / "trajectories" / "chosen.jsonl").write_text("mine")
    (run / "checkpoints.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"trajectories/chosen.jsonl was not written by a run"):
        make_trainer(max_steps=1, overwrite=True).train()
    assert (run / "checkpoint-3").is_dir() and (run / "evaluations.jsonl").is_file()
    (run / "trajectories" / "chosen.jsonl").unlink()
    trainer = make_trainer(max_steps=1, overwrite=True)
    with pytest.warns(UserWarning, match="is not written there"):
        trainer.evaluate(TASKS)  # nothing is deleted for an evaluation; it is written when training begins
    trainer.train()
    assert {path.name for path in run.iterdir()} == {
        *("notes.txt", "README.md", "checkpoints.txt", ".lock"),
        *("run.json", "evaluations.jsonl", "log.jsonl", "trajectories"),
    }
    names = sorted(path.name for path in (run / "trajectories").iterdir())
    assert names == ["eval-000000.jsonl", "train-000001.jsonl"]
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 1
    trainer.train()  # the same run goes on
    assert len(list((run / "trajectories").glob("train-*"))) == 2


def test_overwrite_leaves_what_is_no_run(make_trainer, run):
    with pytest.raises(ValueError, match="in the output_dir .* that overwrite would delete"):
        make_trainer(model=run / "checkpoint-1", overwrite=True).train()
    with pytest.raises(ValueError, match="one deletes the run in output_dir, the other continues it"):
        check_free(run, "auto", overwrite=True)
    (run / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an evaluation of `g2po evaluate`: pass another --output_dir"):
        check_free(run, None, overwrite=True)
    assert (run / "checkpoint-3" / "model.safetensors").is_file()


def test_a_model_is_not_replaced_by_the_run_that_trains_it(make_trainer, tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "out")
    before = files_of(model)
    with pytest.raises(ValueError, match="the folder of the model that is trained, whose weights the run would repl"):
        make_trainer(model=model, max_steps=1).train()
    assert files_of(model) == before


def test_auto_where_there_is_no_checkpoint(make_trainer, run, capsys):
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        shutil.rmtree(run / name)
    with pytest.raises(ValueError, match=r"holds no checkpoint to continue, but another run"):
        make_trainer(**OPTIONS).train(resume_from_checkpoint="auto")  # it is finished, and would lose its model
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no checkpoint to continue, but another run"):
        make_trainer(**OPTIONS, seed=1).train(resume_from_checkpoint="auto")
    assert len(list((run / "trajectories").glob("train-*"))) == 3
    capsys.readouterr()
    make_trainer(**{**OPTIONS, "max_steps": 1}).train(resume_from_checkpoint="auto")  # stopped before its first
    assert "stopped before its first checkpoint and starts again" in capsys.readouterr().out
    assert [path.name for path in (run / "trajectories").iterdir()] == ["train-000001.jsonl"]


def test_a_checkpoint_of_another_run_is_not_resumed(make_trainer, run, tmp_path):
    described = json.loads((run / "run.json").read_text())
    state = json.loads((run / "checkpoint-3" / "g2po_state.json").read_text())
    assert described["run_id"] == state["run_id"] and len(described["run_id"]) == 32
    (run / "run.json").write_text(json.dumps({**described, "run_id": "another"}))
    before = files_of(run)
    trainer = make_trainer(**{**OPTIONS, "max_steps": 4})
    for resume in ("auto", str(run / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"checkpoint-\d' is a checkpoint of another run than"):
            trainer.train(resume_from_checkpoint=resume)
    with pytest.raises(ValueError, match="holds another run"):  # a refused resume has not made it this trainer's
        trainer.train()
    (run / "run.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="environment was 'LongLetterEnvironment' and is 'LetterEnvironment'"):
        make_trainer(**{**OPTIONS, "environment": LetterEnvironment}).train(resume_from_checkpoint="auto")
    assert files_of(run) == {**before, run / "run.json": json.dumps(described).encode()}
    elsewhere = make_letter_trainer(run, tmp_path / "new", **{**OPTIONS, "max_steps": 4, "max_turns": 3})
    elsewhere.train(resume_from_checkpoint=str(run / "checkpoint-3"))  # into a free folder
    elsewhere.close()
    assert json.loads((tmp_path / "new" / "run.json").read_text())["run_id"] == described["run_id"]
    assert [path.name for path in (tmp_path / "new" / "trajectories").glob("train-*")] == ["train-000004.jsonl"]


def test_resumed_with_other_settings_each_part_is_shown_with_its_own(make_trainer, run, capsys):
    """gamma, max_turns and what trains of an iteration are those of the part that it belongs to."""
    changed = {
        "gamma": 0.5,
        "max_turns": 4,
        "invalid_action_penalty": 0.5,
        "estimator_kwargs": {"edge_centric": False},
    }
    make_trainer(**{**OPTIONS, **changed, "max_steps": 4}).train(resume_from_checkpoint="auto")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert sorted(printed) == [
        "estimator_kwargs: None -> {'edge_centric': False} from step 4 on",
        "estimator_name: 'g2po' -> 'g2po without A_EC' from step 4 on",
        "gamma: 0.9 -> 0.5 from step 4 on",
        "invalid_action_penalty: 0.1 -> 0.5 from step 4 on",
        "max_steps: 3 -> 4 from step 4 on",
        "max_turns: 7 -> 4 from step 4 on",
    ]
    described = read_run(run)
    assert [part["first_step"] for part in described["parts"]] == [1, 4]
    assert described["parts"][1]["changed"]["play.max_turns"] == [7, 4] and described["trainer"]["gamma"] == 0.5
    shown = Run(run)
    for number in (1, 2, 3, 4):
        groups = shown.iteration(number)["groups"]
        assert groups and all(group["stored"] and group["adds_up"] for group in groups), number
    assert shown.about()["settings"]["gamma"] == "0.9, from step 4 0.5"
    assert [gamma_of(described, number) for number in (1, 3, 4)] == [0.9, 0.9, 0.5]
    assert "  gamma: 0.9 -> 0.5 from step 4 on" in notes(described)

    # From an earlier checkpoint: what was written later is another continuation's.
    make_trainer(**{**OPTIONS, "gamma": 0.7, "max_steps": 2}).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert "checkpoint-2, checkpoint-3, checkpoint-4: kept as superseded-checkpoint-…" in capsys.readouterr().out
    assert sorted(path.name for path in run.glob("*checkpoint-*")) == [
        *("checkpoint-1", "checkpoint-2"),
        *(f"superseded-checkpoint-{step}" for step in (2, 3, 4)),
    ]
    assert sorted(path.name for path in (run / "trajectories").iterdir()) == [
        *("eval-000000.jsonl", "train-000001.jsonl", "train-000002.jsonl"),
    ]
    described = read_run(run)
    assert [part["first_step"] for part in described["parts"]] == [1, 2]
    assert described["parts"][1]["changed"]["trainer.gamma"] == [0.9, 0.7]


def test_parts_of_several_resumes():
    first = {"trainer": {"gamma": 0.9, "beta": 0.1, "seed": 0}, "environment": {"import": "a:A", "kwargs": {"n": 1}}}
    second = {"trainer": {"gamma": 0.5, "beta": 0.1, "seed": 0, "new": 1}, "environment": {"import": "a:A"}}
    third = {"trainer": {"gamma": 0.5, "beta": 0.2, "seed": 0, "new": 1}, "environment": {"import": "a:A"}}
    assert changes(first, {**first, "run_id": "x", "parts": []}) == {}
    assert changes({"trainer": {"hub_token": "<HUB_TOKEN>"}}, {"trainer": {"hub_token": HIDDEN}}) == {}
    second["parts"] = next_parts(first, 4, second)
    assert second["parts"][1:] == [
        {"first_step": 5, "changed": {"environment.kwargs": [{"n": 1}, None], "trainer.gamma": [0.9, 0.5]}}
    ]
    third["parts"] = next_parts(second, 8, third)
    assert [part["first_step"] for part in third["parts"]] == [1, 5, 9]
    seen = [settings_at(third, step) for step in (4, 5, 8, 9)]
    assert [(one["trainer"]["gamma"], one["trainer"]["beta"]) for one in seen] == [
        *((0.9, 0.1), (0.5, 0.1), (0.5, 0.1), (0.5, 0.2)),
    ]
    assert seen[0]["environment"] == first["environment"] and seen[1]["environment"] == second["environment"]
    again = next_parts(third, 6, third)  # goes on from before the third part, with its settings
    assert [part["first_step"] for part in again] == [1, 5, 7]
    assert again[2]["changed"] == {"trainer.beta": [0.1, 0.2]}


HOLD = (
    "import os, sys; from g2po_trl.runs.ownership import FolderLock; lock = FolderLock(sys.argv[1]); lock.acquire();"
    "child = os.fork(); child or os.execvp('sleep', ['sleep', '60']); print(child, flush=True); sys.stdin.read()"
)


def test_one_process_at_a_time(make_trainer, tmp_path):
    """The lock goes with its process, whatever its children do."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(holder.stdout.readline())
    try:
        trainer = make_trainer(max_steps=1)
        with pytest.raises(ValueError, match=rf"process {holder.pid} on \S+ is training there: wait for it"):
            trainer.train()
        with pytest.raises(ValueError, match="is writing there"), held(tmp_path / "out", "output"):
            raise AssertionError("held")
        assert what_is_in(tmp_path / "out") == []
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        trainer.train()
    finally:
        os.kill(child, signal.SIGKILL)
    with held(tmp_path / "out", "output"):  # `train` has given it back
        pass
    with held(tmp_path / "new", "output"):
        pass
    assert not (tmp_path / "new").exists(), "nothing was written"


def test_commands_refuse_a_folder_that_is_taken(run, tmp_path, capsys):
    before, own = files_of(run), ["--model", str(run), "--num-environment-workers", "1", "--limit", "1"]
    with pytest.raises(SystemExit, match="holds another run .*--overwrite"):
        starting_point(make_config(run))
    with pytest.raises(SystemExit, match="which holds a training run: pass another --output"):
        evaluate([*own, "--output", str(run), "--overwrite"])
    lock = FolderLock(tmp_path / "evaluation")
    assert lock.acquire()
    with pytest.raises(SystemExit, match=rf"process {os.getpid()} on \S+ is writing there: wait for it"):
        evaluate([*own, "--output", str(tmp_path / "evaluation")])
    assert [path.name for path in (tmp_path / "evaluation").iterdir()] == [".lock"]
    lock.release()
    evaluate([*own, "--output", str(tmp_path / "evaluation")])
    assert files_of(run) == before
    with pytest.raises(ValueError, match="holds an evaluation of `g2po evaluate`"):
        check_free(tmp_path / "evaluation", None, overwrite=True)


def test_a_run_that_another_has_overwritten_writes_no_evaluations_there(tmp_path):
    """Two trainers of a notebook, or one that was left open while a command overwrote its run."""
    described = {"trainer": {}, "versions": {}}

    def begun(overwrite):
        folder = RunFolder(tmp_path, save_trajectories=False)
        folder.begin(None, overwrite, {})
        folder.take(resumed=False)
        folder.write_run(described, {})
        folder.release()
        return folder

    first = begun(overwrite=False)
    second = begun(overwrite=True)
    assert second.take_for_evaluation() is first.take_for_evaluation() is False
    second.add_evaluation("eval", 3, 0.4, {"success_rate": 0.5}, [], TASKS)
    before = (tmp_path / "evaluations.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="holds another run: this evaluation is not written there"):
        first.add_evaluation("eval", 7, 0.4, {"success_rate": 0.1}, [], TASKS)
    assert (tmp_path / "evaluations.jsonl").read_bytes() == before


def test_an_output_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="output is '.*' and cannot be written"), held(output, "output"):
            raise AssertionError("held")


def test_where_files_cannot_be_locked_it_is_said(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.warns(UserWarning, match="cannot be locked .*: see to it that no other process writes"):
        assert FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("name", ["train", "replaced", "seen/easy", "../../escaped", "..", "a\\b", "", "a\nb"])
def test_names_of_panels_that_would_be_other_files(name):
    with pytest.raises(ValueError, match="metric_key_prefix is"):
        check_panel_name(name)
    check_panel_name("eval_unseen 2.0")


def test_panels_are_named_before_anything_is_played(make_trainer, tmp_path):
    with pytest.raises(ValueError, match="the name of a panel in eval_dataset is '../x'"):
        make_trainer(eval_dataset={"../x": TASKS})
    with pytest.raises(ValueError, match="is 'a_t1', and other_eval_temperatures has 1.0: the results of 'a'"):
        make_trainer(eval_dataset={"a": TASKS, "a_t1": TASKS}, other_eval_temperatures=[1.0])
    trainer = make_trainer(max_steps=1)
    with pytest.raises(ValueError, match="metric_key_prefix is 'train', which names the trajectories of training"):
        trainer.evaluate(TASKS, metric_key_prefix="train")
    assert not (tmp_path / "out" / "evaluations.jsonl").exists()


def test_what_a_kill_has_cut_is_left_out_and_counted(run):
    """Files as an older version left them, which wrote in place."""
    whole = len(load_iterations(run)[2].groups)
    trajectories, evaluations = run / "trajectories" / "train-000003.jsonl", run / "evaluations.jsonl"
    content = trajectories.read_bytes()
    trajectories.write_bytes(content[:-200])
    evaluations.write_bytes(evaluations.read_bytes()[:-100])
    (run / "trainer_state.json").write_text("")
    shown, log = Run(run), run / "log.jsonl"
    logged = [line for line in log.read_bytes().splitlines() if b"episode/success_rate" in line]
    log.write_bytes(b"\n".join([*logged[:2], logged[2][:-100]]))
    assert (len(logged), len(shown.overview()["curves"])) == (3, 2)
    log.unlink()
    with pytest.warns(UserWarning, match=r"trainer_state.json cannot be read"):
        overview = Sources(open_folder(run)).overview()
    assert len(overview["training"]["curves"]) == 3 and len(overview["training"]["evaluations"]) == 1
    iteration = shown.iteration(3)
    assert iteration["unfinished"] == 1 and shown.iteration(2)["unfinished"] == 0
    assert sum(len(group["trajectories"]) for group in iteration["groups"]) == 7
    last = load_iterations(run)[2]
    assert last.unfinished == 1 and len(last.groups) == whole
    trajectories.write_bytes(content[:200] + content[-200:])  # not by a kill
    with pytest.raises(ValueError, match=r"train-000003.jsonl, line 1: not a trajectory"):
        shown.iteration(3)
    server = make_server(Sources(shown))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(HTTPError, match="500") as answer:
        urlopen(f"{address}/iteration/3")
    assert b"train-000003.jsonl, line 1: not a trajectory" in answer.value.read()
    assert json.load(urlopen(f"{address}/iteration/2"))["n"] == 2
    server.shutdown()
    server.server_close()
    (run / "run.json").write_text('{"trainer":')
    with pytest.raises(ValueError, match="run.json is not valid JSON"):
        Run(run)


def test_a_cut_evaluations_file_does_not_stop_a_resume(make_trainer, run):
    path = run / "evaluations.jsonl"
    before = path.read_text().splitlines()
    path.write_text(before[0] + "\n" + before[1][:-100])
    make_trainer(**{**OPTIONS, "max_steps": 4}).train(resume_from_checkpoint="auto")
    assert path.read_text().splitlines() == before[:1]


def test_resumed_with_another_number_of_processes_an_iteration_counts_once(make_trainer, run):
    """Two processes had played iteration 4 when they were killed after checkpoint-3."""
    for rank in (0, 1):
        shutil.copy(
            run / "trajectories" / "train-000003.jsonl", run / "trajectories" / f"train-000004-rank{rank}.jsonl"
        )
    make_trainer(**{**OPTIONS, "max_steps": 4}).train(resume_from_checkpoint="auto")
    assert [path.name for path in (run / "trajectories").glob("train-000004*")] == ["train-000004.jsonl"]
    assert [sum(map(len, iteration.groups)) for iteration in load_iterations(run)] == [8, 8, 8, 8]
