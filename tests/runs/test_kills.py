"""kill -9 at random moments of a run that writes: view, report, evaluate and resume work, and nothing written is lost.

The run makes several iterations a second; each ends with a checkpoint, every second one with an evaluation, every
third with the model and its card in output_dir. Each attempt is a fork of this process, which has imported everything.
`KILLS=100 make test-slow ARGS="-k killed_at_any -o faulthandler_timeout=3600"` kills it more often, in 5
to 20 minutes.
"""

import ctypes
import os
import random
import select
import signal
import sys
import time
import traceback

import pytest
import torch
from letter_environment import LongLetterEnvironment
from letter_trainer import TASKS, make_letter_trainer
from transformers import TrainerCallback

from g2po_trl.cli.commands.evaluate import main as evaluate
from g2po_trl.report.summary import analyse
from g2po_trl.runs.iterations import load_evaluations, load_iterations
from g2po_trl.runs.ownership import checkpoints_in, step_of, weights_in
from g2po_trl.runs.run_json import read_run
from g2po_trl.view.data import Run
from g2po_trl.view.sources import Sources

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
EPISODES = 4
OPTIONS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "eval_strategy": "steps", "eval_steps": 2}
OPTIONS |= {"per_device_train_batch_size": EPISODES, "num_generations": 2, "max_turns": 3, "disable_tqdm": True}
OPTIONS |= {"lr_scheduler_type": "constant"}


def train(model, folder, steps, say):
    """Train; `say` what was written, once it was."""
    torch.set_num_threads(1)
    panel = TASKS.select(range(3))
    trainer = make_letter_trainer(model, folder, LongLetterEnvironment, eval_dataset=panel, max_steps=steps, **OPTIONS)
    add_rollout, add_evaluation = trainer.folder.add_rollout, trainer.folder.add_evaluation

    def rollout(iteration, *arguments):
        add_rollout(iteration, *arguments)
        say(f"train {iteration}")

    def evaluation(name, step, *arguments):
        add_evaluation(name, step, *arguments)
        say(f"eval {step}")

    class Says(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            say(f"begin {state.global_step}")

        def on_save(self, args, state, control, **kwargs):
            say(f"checkpoint {state.global_step}")
            if state.global_step % 3 == 0 and trainer.folder.evaluations:
                trainer.save_model()
                trainer.save_state()
                trainer.create_model_card()

    trainer.folder.add_rollout, trainer.folder.add_evaluation = rollout, evaluation
    trainer.add_callback(Says())
    trainer.train(resume_from_checkpoint="auto")
    trainer.close()


def start(model, folder, steps, log):
    """A forked process that trains, and a pipe of what it has written."""
    read, write = os.pipe()
    if process := os.fork():
        os.close(write)
        return process, read
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a failing test leaves nobody with its pipes
    os.close(read)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    try:
        train(model, folder, steps, lambda text: os.write(write, f"{text}\n".encode()))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def said(pipe, until=None, seconds=240.0):
    """Lines of a pipe: up to one that begins so, or up to its end."""
    text, deadline = b"", time.monotonic() + seconds
    while until is None or not any(line.startswith(until) for line in text.split(b"\n")[:-1]):
        assert select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0], "it says nothing"
        if not (part := os.read(pipe, 65536)):
            break
        text += part
    return [line.decode().split() for line in text.split(b"\n")[:-1]]


class Written:
    """What attempts have said that they wrote, as far as no later attempt may have begun before it."""

    def __init__(self):
        self.iterations, self.evaluations, self.checkpoint = set(), set(), 0

    def add(self, lines):
        # A resume removes what follows its checkpoint before it says where it begins: it may be killed in between.
        if not any(kind == "begin" for kind, _ in lines):
            self._begin(self.checkpoint)
        for kind, number in ((kind, int(number)) for kind, number in lines):
            if kind == "begin":
                assert number >= self.checkpoint, "a checkpoint that was written was not continued from"
                self._begin(number)
            elif kind == "checkpoint":
                self.checkpoint = number
            else:
                (self.iterations if kind == "train" else self.evaluations).add(number)

    def _begin(self, number):
        self.checkpoint = number
        self.iterations = set(range(1, number + 1))
        self.evaluations = {n for n in self.evaluations if n <= number}


def check(folder, written, attempt, output):
    """View, report and evaluate what a kill has left."""
    if not list(folder.glob("trajectories/*.jsonl")):
        assert not written.iterations and not written.evaluations
        return
    run = Run(folder)
    sources = Sources(run)
    overview = sources.overview()
    assert written.evaluations <= {entry["step"] for entry in load_evaluations(run.folder)}
    assert overview["training"] == bool(run.numbers)
    (curves,) = (source["curves"] for source in overview["sources"])
    assert len(curves) >= written.checkpoint
    for shown in sources.sets().values():
        data = shown.data()
        assert data["unfinished"] == 0 and sum(len(task["episodes"]) for task in data["tasks"]) == 3
    # Written, but not yet said: one at most.
    assert written.iterations <= set(run.numbers)
    assert run.numbers == list(range(1, len(run.numbers) + 1)) and len(run.numbers) <= len(written.iterations) + 1
    for number in run.numbers[-3:]:
        groups = run.iteration(number)["groups"]
        assert sum(len(group["trajectories"]) for group in groups) == EPISODES
        assert all(group["stored"] and group["adds_up"] for group in groups)
    if run.numbers:
        numbers = analyse(load_iterations(folder), None, read_run(folder))
        assert len(numbers["iterations"]) == len(run.numbers)
        assert not any(row["unfinished"] for row in numbers["iterations"])
    checkpoints = checkpoints_in(folder)
    assert not written.checkpoint or step_of(checkpoints[-1]) >= written.checkpoint
    models = [*([folder] if weights_in(folder) else []), *checkpoints[-1:]]
    for model in models[attempt % 2 :][:1]:
        flags = ["--num-environment-workers", "1", "--limit", "1", "--overwrite", "--output", str(output)]
        evaluate(["--model", str(model), *flags])


@pytest.mark.slow
def test_killed_at_any_moment(tiny_model_dir, tmp_path):
    kills = int(os.environ.get("KILLS", 20))
    folder, log, chance = tmp_path / "run", tmp_path / "log", random.Random(0)
    written = Written()
    for attempt in range(kills):
        process, pipe = start(tiny_model_dir, folder, 10_000, log)
        has_begun = chance.random() < 0.9 or attempt == 0  # else it starts
        lines = said(pipe, b"begin" if attempt else b"checkpoint") if has_begun else []
        time.sleep(chance.uniform(0, 1 + has_begun))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), log.read_text()[-3000:]
        lines += said(pipe)
        os.close(pipe)
        written.add(lines)
        check(folder, written, attempt, tmp_path / "evaluation")
    reached = step_of(checkpoints_in(folder)[-1]) + 1
    assert reached > 1, "nothing was trained in between"

    for name in ("run", "uninterrupted"):  # goes on to its end; and in one piece
        process, pipe = start(tiny_model_dir, tmp_path / name, reached, log)
        said(pipe)
        assert os.waitpid(process, 0)[1] == 0, log.read_text()[-3000:]
    other = tmp_path / "uninterrupted"
    files = [{path.name: path.read_bytes() for path in one.glob("trajectories/*")} for one in (folder, other)]
    assert files[0] == files[1] and len(load_iterations(folder)) == reached
    assert load_evaluations(folder) == load_evaluations(other)
