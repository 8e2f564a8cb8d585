"""Tables of sample trajectories, in stand-ins for Trackio, W&B and TensorBoard's writer."""

import sys
from types import SimpleNamespace

import pytest
from transformers.integrations import TensorBoardCallback

from g2po_trl import Step, Trajectory
from g2po_trl.runs.sample_table import SampleTable

STEPS = [Step("Hall.", "go east", completion="Action: go east"), Step("Garden.", "look")]
WON = Trajectory("t1", STEPS, 10.0, "success", "The end.")
DIED = Trajectory("t2", [], 0.0, "error", error="exception: boom")
TOLD = "[1] Hall.\n> Action: go east\n[2] Garden.\n> look\nThe end."


@pytest.mark.parametrize("backend", ["wandb", "trackio", "tensorboard"])
def test_the_first_trajectories_of_every_second_iteration_are_shown(monkeypatch, backend):
    logged, board = [], TensorBoardCallback.__new__(TensorBoardCallback)
    board.tb_writer = SimpleNamespace(add_text=lambda *text: logged.append(text))
    table = SampleTable(2, [board])
    if backend != "tensorboard":
        stand_in = SimpleNamespace(Table=lambda dataframe: dataframe, log=logged.append)
        monkeypatch.setitem(sys.modules, backend, stand_in)
    for iteration in (1, 2, 3):
        table.offer([WON, DIED] * 3, iteration)
        state = SimpleNamespace(is_world_process_zero=True, global_step=iteration)
        table.on_log(SimpleNamespace(report_to=[backend]), state, None)
    if backend == "tensorboard":
        first = "iteration 2, task t1, outcome success, reward 10.0, turns 2\n\n    " + TOLD.replace("\n", "\n    ")
        assert logged[0] == ("trajectories/t1", first, 2) and len(logged) == 4
    else:
        (rows,) = (list(frame.itertuples(index=False, name=None)) for entry in logged for frame in entry.values())
        won = (2, "t1", "success", 10.0, 2, TOLD)
        assert rows == [won, (2, "t2", "error", 0.0, 0, "exception: boom")] * 2
