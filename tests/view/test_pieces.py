"""Everything that the page shows of a run and of an evaluation, compared with a file."""

import json
from pathlib import Path

import pytest
from viewing import BAD_TEXT, conversations, evaluated, tool_step, trajectory, write_evaluation, write_run

from g2po_trl import Trajectory
from g2po_trl.utils.json import to_json
from g2po_trl.view import Sources, open_folder

GOLDEN = Path(__file__).with_name("pieces.json")


@pytest.fixture
def folders(tmp_path):
    """A run with a success, errors, tools, conversations and NaN in its log; an evaluation that is being written."""
    ends = [trajectory("one", "ha", 10.0), trajectory("one", "hb", 0.0), trajectory("one", "hac", 0.0, "truncated")]
    error = Trajectory("one", [], 0.0, "error", error="exception: boom")
    tools = [tool_step("look", "known"), tool_step("lok", "unknown"), tool_step("look", "unreadable")]
    called = Trajectory("three", [*tools, tool_step(None, "none")], 0.0, "truncated", row={"seed": 7})
    lost = [trajectory("two", ["x", BAD_TEXT, "x"], 0.0), trajectory("two", "xy", 0.0)]
    nan = float("nan")
    files = {
        "train-000001": [*ends, error, *lost, called, *conversations()],
        "replaced-000001": lost,
        "eval-000000": [trajectory("one", "hb", 0.0, task="Put a cup on the desk."), *conversations()],
        "eval-000002": [trajectory("one", "ha", 10.0, task="Put a cup on the desk.")],
    }
    log = [{"step": 2, "episode/success_rate": 0.25, "episode/turns": 2.0, "kl": nan, "time/update": 2.0}]
    evaluations = [{"step": 0, "success_rate": 0.0, "turns_to_success": nan}, {"step": 2, "success_rate": nan}]
    settings = {"gamma": 0.5, "advantage_estimator": "g2po", "scale_by_std": False, "max_steps": 7}
    run = write_run(tmp_path / "run", files, log, evaluations, settings, optimizer_steps_per_iteration=2)
    (run / "panels").mkdir()
    (run / "panels" / "eval.jsonl").write_text('{"task_id": "one", "task_type": "put"}\n{"seed": 3}\n')

    first = [
        evaluated("two", "hb", 0.0, 0),
        evaluated("one", "hb", 0.0, 1, last=False),
        evaluated("one", "hca", 10.0, 1, trial=1, notes=["take the other way"]),
        evaluated("4", "", 0.0, 2),
    ]
    return run, write_evaluation(tmp_path / "evaluation", first, first[:1])


def test_the_pieces_of_the_page(folders):
    """As they were when each of their parts had been checked by hand."""
    found = {}
    for folder in folders:
        sources = Sources(open_folder(folder))
        pieces = {"overview": sources.overview, **sources.pieces()}
        text = to_json({name: read() for name, read in pieces.items()}).replace(str(folder), folder.name)
        found[folder.name] = json.loads(text, parse_constant=pytest.fail)
    assert found == json.loads(GOLDEN.read_text())
