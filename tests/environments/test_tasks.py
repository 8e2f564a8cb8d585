"""Rows of tasks reach `reset` as they are written, typed as they are written: in train, check and evaluate alike."""

import json
import math
import pickle

import programs
import pytest
from datasets import Dataset, DatasetDict, Image
from refusals import refused
from vision_models import drawing

from g2po_trl import EpisodeLimits, TextEnvironment, tasks_dataset
from g2po_trl.environments.setup import Setup
from g2po_trl.environments.tasks import decoded, read_tasks, task_id_of, tasks_hash
from g2po_trl.utils.images import as_picture

ROWS = [
    {"seed": 1},
    {"seed": 2, "level": 9},
    {"seed": 3, "level": 9.5, "start": "attic"},
    {"seed": 4, "options": {"fire": True}},
    {"seed": 5, "options": {"water": [1, 2.0, None]}},
    {"seed": 2**64 - 1, "options": {}},
    {"seed": -7, "start": "a\u2028b\x85c"},
    {"seed": 8, "start": "half \ud83d a character"},
]
GAME = """
import json
from pathlib import Path

from g2po_trl import Observation, StepResult, TextEnvironment

HERE = Path(__file__).parent


class Game(TextEnvironment):
    def reset(self, **task):
        with open(HERE / "played.txt", "a") as file:
            print(repr(task), file=file)
        return Observation(f"room {task['seed']}", admissible_actions=["go", "stay"], task="Go.")

    def step(self, action):
        return StepResult("the end", reward=float(action == "go"), terminated=True)
"""


def check_datasets(environment_factory, train_dataset, eval_dataset=None):
    Setup(environment_factory, EpisodeLimits(5), None, None, train_dataset, eval_dataset)


def told(row):
    return repr(dict(sorted(row.items())))


def test_rows_come_back_as_they_were_given():
    rows = [*ROWS, {}, {"seed": True}, {"seed": math.inf}]
    dataset = tasks_dataset(rows)
    assert list(map(repr, dataset)) == list(map(repr, rows))
    assert repr(dataset.select([2, 0])[0]) == repr(rows[2])
    assert repr(pickle.loads(pickle.dumps(dataset.shuffle(seed=3)))[1]) in map(repr, rows)
    assert len(dataset.filter(lambda row: row["level"] is not None)) == 2, "a batch has all columns"
    assert tasks_hash(dataset) == tasks_hash(rows) and len(dataset) == len(rows)
    for places in ([0, 4, 8], [8, 8], [1]):  # as a data loader reads them, also in another process
        batch = pickle.loads(pickle.dumps(dataset.__getitems__(places)))
        assert list(map(repr, map(decoded, batch))) == [repr(rows[place]) for place in places]


@pytest.mark.parametrize("row", [{"at": (1, 2)}, {"of": {1: 2}}, {"a": object()}])
def test_what_json_does_not_give_back_is_refused(row):
    with refused("task 2"):
        tasks_dataset([{"seed": 1}, row])


class Strict(TextEnvironment):
    def reset(self, seed, level=1):
        return "a room"


def test_each_row_is_checked():
    check_datasets(Strict, tasks_dataset([{"seed": 1}, {"seed": 2, "level": 3}]))
    for rows, held in (([{"seed": 1}, {"seed": 2, "levle": 3}], {}), ([{"seed": 1}], {"held": [{"level": 1}]})):
        with refused("Strict.reset"):
            check_datasets(Strict, tasks_dataset(rows), {name: tasks_dataset(held[name]) for name in held})


class Anything(TextEnvironment):
    def reset(self, **row):
        return "a room"


ONE = Dataset.from_dict({"seed": [1]})


@pytest.mark.parametrize(
    "dataset",
    [None, [{"seed": 1}], DatasetDict({"all": ONE}), ONE.to_iterable_dataset(), ONE.select([]), ONE.to_pandas()],
)
def test_what_is_no_dataset_is_refused(dataset):
    with refused("train_dataset"):
        check_datasets(Anything, dataset)
    if dataset is not None and not isinstance(dataset, DatasetDict):  # `None` is no panel, a dictionary several
        with refused("eval_dataset"):
            check_datasets(Anything, ONE, dataset)


def test_columns_that_no_task_can_have_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(as_picture(drawing(1)).png)
    pictures = Dataset.from_dict({"picture": [str(tmp_path / "a.png")]})
    for dataset, field in (
        (pictures.with_transform(lambda batch: {"picture": [1]}), "train_dataset"),
        (ONE.with_format("numpy"), "train_dataset"),
        (tasks_dataset([{"seed": 1}]).with_format(None), "train_dataset"),
        (tasks_dataset([{"seed": 1}]).with_transform(lambda batch: {"seed": [1]}), "train_dataset"),
        (pictures.cast_column("picture", Image()), "picture"),  # its text differs each time
        (Dataset.from_dict({"self": [1]}), "Anything.reset"),
    ):
        with refused(field):
            check_datasets(Anything, dataset)


def test_train_check_and_evaluate_play_the_file(tmp_path, tiny_model_dir):
    (tmp_path / "game.py").write_text(GAME)
    lines = [json.dumps(row, ensure_ascii=row["seed"] == 8) for row in ROWS]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_tasks(tmp_path / "tasks.jsonl") == ROWS
    (tmp_path / "empty.jsonl").write_text("\n")
    with refused("tasks"):
        read_tasks(tmp_path / "empty.jsonl")
    flags = "--max_steps 1 --max_turns 1 --max_completion_length 2 --num_environment_workers 1 --num_generations 2"
    flags += " --per_device_train_batch_size 12 --num_eval_tasks 2 --output_dir run --save_strategy no"

    def played(*command):
        (tmp_path / "played.txt").unlink(missing_ok=True)
        run = programs.run("-m", "g2po_trl.__main__", *command, cwd=tmp_path)
        assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
        return {told(eval(line)) for line in (tmp_path / "played.txt").read_text().splitlines()}

    everything = set(map(told, ROWS))
    assert played("train", "game.py:Game", "--model", str(tiny_model_dir), *flags.split()) == everything
    (tmp_path / "rest.jsonl").write_text("\n".join(lines[3:]) + "\n", encoding="utf-8")
    check = ["check", "game.py", "--episodes", "1"]
    assert played(*check) | played(*check, "--tasks", "rest.jsonl") == everything, "it plays the first five"
    evaluate = ["evaluate", "--model", "run", "--num-environment-workers", "1", "--max-completion-length", "2"]
    assert played(*evaluate) == set(map(told, ROWS[-2:])), "the panel, from the run's folder"
    own = ["--environment", f"{tmp_path}/game.py:Game", "--tasks", "tasks.jsonl", "--output", "all"]
    assert played(*evaluate, *own) == everything


def test_a_name_that_is_none_names_no_task():
    """As rows without `task_id` get it where a table has the column."""
    rows = [{"task_id": None, "seed": seed} for seed in range(3)]
    assert len({task_id_of(row) for row in rows} | {"None"}) == 4
    assert task_id_of({"task_id": 0, "seed": 1}) == "0"
