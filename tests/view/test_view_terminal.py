"""The viewer as text: what is printed of a run and of an evaluation."""

from pathlib import Path

import pytest
from viewing import trajectory, write_run

from g2po_trl import write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.view import Run, open_folder
from g2po_trl.view.terminal import TerminalView

GOLDEN = Path(__file__).with_name("terminal.txt")


@pytest.fixture
def run(tmp_path):
    """Three iterations: success 0, 50 and 100 %; an evaluation before and after; then groups without a signal."""
    won = trajectory("one", "ha", 10.0, task="wash the mug")
    lost = trajectory("one", "hab", 0.0, "truncated", task="wash the mug")
    files = {"train-000001": [lost] * 2, "train-000002": [won, lost], "train-000003": [won] * 2}
    log = [{"step": n, "episode/success_rate": (n - 1) / 2, "time/update": 1.0} for n in (1, 2, 3)]
    evaluations = [{"name": "eval", "step": n, "success_rate": n / 3} for n in (0, 3)]
    return write_run(tmp_path / "run", files, log, evaluations, optimizer_steps_per_iteration=1)


def test_what_is_printed(run, tmp_path):
    """Groups, a failed episode of a group that also succeeded, a board, tasks of one sentence, and an evaluation."""
    nothing = [trajectory("one", "ha", 0.0, row={"seed": 7}) for _ in range(2)]
    for step in (step for one in nothing for step in one.steps):
        step.advantage = 0.0
    board = trajectory("two", ["x", "y"], 0.0)
    board.steps[0].observation = "# # # #\n# p o #\n# _ x #\n# # # #"
    board.steps[1].observation = f"{board.steps[0].observation}\nyou+1+1 box+1+1 goal+0+1"
    write_jsonl(run / "trajectories" / "train-000004.jsonl", [*nothing, board])
    alike = [trajectory(name, "ha", 10.0, task="wash the mug") for name in ("level-1", "level-2")]
    write_jsonl(run / "trajectories" / "train-000005.jsonl", alike)
    ends = [trajectory("one", "ha", 10.0), trajectory("two", "h", 0.0)]
    write_jsonl(tmp_path / "evaluation" / "trajectories" / "panel-0.jsonl", ends)
    (tmp_path / "evaluation" / "settings.json").write_text('{"panel": "mine"}')
    view, evaluation = TerminalView(Run(run), 120), TerminalView(open_folder(tmp_path / "evaluation"))
    texts = [view.text(2), view.text(4), view.text(4, (2, 1)), view.text(5), evaluation.text()]
    assert "\n=====\n".join(texts) == GOLDEN.read_text().rstrip("\n")


def test_a_terminal_obeys_nothing_that_was_written_by_a_model(run):
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
    one = trajectory("one", [evil], 0.0, task=evil)
    one.steps[0].action, one.final_observation = evil, evil
    failed = trajectory("two", [evil], 0.0, "error", error=evil)
    write_jsonl(run / "trajectories" / "train-000004.jsonl", [one, failed])
    for episode in ((1, 1), (2, 1)):
        text = TerminalView(Run(run)).text(4, episode)
        assert "title" in text and not set("\x1b\x07\x9b\r\u202e") & set(text)


def test_the_command_prints_an_episode(run, capsys):
    main([str(run), "--text", "--iterations", "2", "--episode", "1.1"])
    assert "Episode 1.1: solved, reward 10, 2 steps" in capsys.readouterr().out
    assert not (run / "view.html").exists()
