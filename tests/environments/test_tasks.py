"""Rows of tasks reach `reset` as they are written, typed as they are written."""

import json
import math
import pickle

import pytest
from datasets import Dataset, DatasetDict, Image
from letter_environment import drawing
from refusals import refused

from g2po_trl import EpisodeLimits, Observation, StepResult, TextEnvironment, tasks_dataset
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


def told(rows):
    return {repr(dict(sorted(row.items()))) for row in rows}


def test_rows_come_back_as_they_were_given():
    rows = [*ROWS, {}, {"seed": True}, {"seed": math.inf}]
    dataset = tasks_dataset(rows)
    assert list(map(repr, dataset)) == list(map(repr, rows))
    assert repr(dataset.select([2, 0])[0]) == repr(rows[2])
    assert repr(pickle.loads(pickle.dumps(dataset.shuffle(seed=3)))[1]) in map(repr, rows)
    assert len(dataset.filter(lambda row: row["level"] is not None)) == 2, "a batch has all columns"
    assert tasks_hash(dataset) == tasks_hash(rows) and len(dataset) == len(rows)
    # As rows without `task_id` get it where a table has the column.
    assert len({task_id_of({"task_id": None, "seed": seed}) for seed in range(3)} | {"None"}) == 4
    for places in ([0, 4, 8], [8, 8], [1]):  # as a data loader reads them, also in another process
        batch = pickle.loads(pickle.dumps(dataset.__getitems__(places)))
        assert list(map(repr, map(decoded, batch))) == [repr(rows[place]) for place in places]


@pytest.mark.parametrize("row", [{"at": (1, 2)}, {"of": {1: 2}}, {"a": object()}])
def test_what_json_does_not_give_back_is_refused(row):
    with refused("task 2"):
        tasks_dataset([{"seed": 1}, row])


class Anything(TextEnvironment):
    def reset(self, **row):
        return "a room"


ONE, WRITTEN = Dataset.from_dict({"seed": [1]}), tasks_dataset([{"seed": 1}])
PICTURES = Dataset.from_dict({"picture": [{"bytes": as_picture(drawing(1)).png, "path": None}]})


@pytest.mark.parametrize(
    ("dataset", "field"),
    [
        (None, "train_dataset"),
        ([{"seed": 1}], "train_dataset"),
        (DatasetDict({"all": ONE}), "train_dataset"),
        (ONE.to_iterable_dataset(), "train_dataset"),
        (ONE.select([]), "train_dataset"),
        (ONE.with_format("numpy"), "train_dataset"),
        (PICTURES.with_transform(lambda batch: {"picture": [1]}), "train_dataset"),
        (WRITTEN.with_format(None), "train_dataset"),
        (PICTURES.cast_column("picture", Image()), "picture"),  # its text differs each time
        (Dataset.from_dict({"self": [1]}), "Anything.reset"),
    ],
)
def test_what_is_no_dataset_of_tasks_is_refused(dataset, field):
    with refused(field):
        Setup(Anything, EpisodeLimits(5), None, None, dataset, None)


def test_a_file_is_trained_as_it_is_written(make_trainer, tmp_path):
    lines = [json.dumps(row, ensure_ascii=row["seed"] == 8) for row in ROWS]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n")
    rows, played = read_tasks(tmp_path / "tasks.jsonl"), tmp_path / "played.txt"
    assert told(rows) == told(ROWS)
    with refused("tasks"):
        read_tasks(tmp_path / "empty.jsonl")

    class Game(TextEnvironment):
        def reset(self, **task):
            with played.open("a") as file:
                print(repr(task), file=file)
            return Observation("a room", admissible_actions=["go"])

        def step(self, action):
            return StepResult("the end", terminated=True)

    options = {"per_device_train_batch_size": 16, "num_generations": 2, "max_steps": 1}
    make_trainer(Game, dataset=tasks_dataset(rows), **options).train()
    assert told(map(eval, played.read_text().splitlines())) == told(ROWS)
