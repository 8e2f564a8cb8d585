"""Tables of sample trajectories, in stand-ins for Trackio and W&B, and TensorBoard."""

import glob
import json
import os
import sys
from types import SimpleNamespace

import pytest
from letter_trainer import make_config, make_letter_trainer

from g2po_trl import Step, Trajectory
from g2po_trl.runs.sample_table import SampleTable

STEPS = [Step("Hall.", "go east", completion="Action: go east"), Step("Garden.", "look")]
WON = Trajectory("t1", STEPS, 10.0, "success", "The end.")
DIED = Trajectory("t2", [], 0.0, "error", error="exception: boom")


@pytest.mark.parametrize("backend", ["wandb", "trackio"])
def test_the_first_trajectories_of_every_second_iteration_are_a_table(monkeypatch, backend):
    """In a stand-in for the tracker."""
    logged, table = [], SampleTable(2, [])
    monkeypatch.setitem(sys.modules, backend, SimpleNamespace(Table=lambda dataframe: dataframe, log=logged.append))
    for iteration in (1, 2, 3):
        table.offer([WON, DIED] * 3, iteration)
        state = SimpleNamespace(is_world_process_zero=True, global_step=iteration)
        table.on_log(SimpleNamespace(report_to=[backend]), state, None)
    (rows,) = (list(frame.itertuples(index=False, name=None)) for entry in logged for frame in entry.values())
    won = (2, "t1", "success", 10.0, 2, "[1] Hall.\n> Action: go east\n[2] Garden.\n> look\nThe end.")
    assert rows == [won, (2, "t2", "error", 0.0, 0, "exception: boom")] * 2


@pytest.mark.parametrize(("report_to", "every"), [("none", 0), ("tensorboard", 10), (["mlflow", "trackio"], 10)])
def test_a_tracker_with_tables_gets_them_without_another_option(tmp_path, report_to, every):
    assert make_config(tmp_path, report_to=report_to).log_trajectories_every == every
    assert make_config(tmp_path, report_to=report_to, log_trajectories_every=0).log_trajectories_every == 0


def test_tensorboard(tiny_model_dir, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"report_to": ["tensorboard"], "log_trajectories_every": 2}
    make_letter_trainer(tiny_model_dir, tmp_path, max_steps=4, **options).train()
    (folder,) = {os.path.dirname(path) for path in glob.glob(f"{tmp_path}/**/events.out*", recursive=True)}
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    texts = [tag for tag in events.Tags()["tensors"] if tag.startswith("trajectories/")]
    shown = [(event.step, event.tensor_proto.string_val[0].decode()) for tag in texts for event in events.Tensors(tag)]
    assert sorted({step for step, _ in shown}) == [2, 4] and len(shown) == 8
    with open(tmp_path / "trajectories" / "train-000002.jsonl") as file:
        first = json.loads(file.readline())
    assert any(first["steps"][0]["observation"] in text and "outcome" in text for step, text in shown if step == 2)
