"""The viewer as text: what is printed of a run and of an evaluation."""

import json

import pytest
from refusals import refused
from viewing import trajectory

from g2po_trl import write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.view import Run, open_folder
from g2po_trl.view.terminal import TerminalView


@pytest.fixture
def run(tmp_path):
    """Three iterations: success 0, 50 and 100 %; an evaluation before and after."""
    folder = tmp_path / "run"
    for number in (1, 2, 3):
        won = trajectory("one", "ha", 10.0, task="wash the mug")
        lost = trajectory("one", "hab", 0.0, "truncated", task="wash the mug")
        group = [won, lost] if number == 2 else [won if number == 3 else lost] * 2
        write_jsonl(folder / "trajectories" / f"train-{number:06d}.jsonl", group)
    log = [{"step": n, "episode/success_rate": (n - 1) / 2, "time/update": 1.0} for n in (1, 2, 3)]
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in log))
    evaluations = [{"name": "eval", "step": n, "success_rate": n / 3} for n in (0, 3)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    (folder / "run.json").write_text(json.dumps({"trainer": {}, "optimizer_steps_per_iteration": 1}))
    return folder


def test_the_last_rates_of_success(run):
    line = TerminalView(Run(run)).text().splitlines()[2]
    assert line == "Success: last 3 iterations 50.0 %, evaluation 'eval' 100.0 %"


def test_groups_and_a_lost_episode(run):
    text = TerminalView(Run(run)).text(iteration=2)
    assert "Iteration 2 of 3: 50.0 % of 2 episodes solved\n   1 █· 1/2  wash the mug\n" in text
    assert "Episode 1.2: out of turns, reward 0, 3 steps" in text, "of a group that also won, a lost one"
    assert "  Turning point: step 2, V 4.8 to 0.0\n" in text
    assert "  1. room h\n     → go 0\n  2. room a\n     → go 1 [not admissible] [turning point]\n" in text
    assert "     → go 2 [not admissible] [turn limit]\n" in text
    assert text.endswith("     the end of hab") and "\033" not in text
    coloured = TerminalView(Run(run), colour=True).text(2, (1, 1))
    assert "Episode 1.1: \033[32msolved\033[0m" in coloured


def test_a_group_that_taught_nothing(run):
    lost = [trajectory("one", "ha", 0.0, row={"seed": 7}) for _ in range(2)]
    for one in lost:
        for step in one.steps:
            step.advantage = 0.0
    write_jsonl(run / "trajectories" / "train-000004.jsonl", lost)
    text = TerminalView(Run(run), 120).text()
    assert '   1 ·· 0/2  (taught nothing) {"seed": 7}\n' in text and "Turning point: step 2 (fault)\n" in text


def test_tasks_of_one_sentence_are_told_apart_by_their_ids(run):
    path = run / "trajectories" / "train-000004.jsonl"
    write_jsonl(path, [trajectory(name, "ha", 10.0, task="wash the mug") for name in ("level-1", "level-2")])
    text = TerminalView(Run(run)).text()
    assert "1/1  group level-1\n" in text and "1/1  group level-2\n" in text


def test_lines_are_not_longer_than_the_terminal(run):
    write_jsonl(
        run / "trajectories" / "train-000004.jsonl", [trajectory("one", ["long " * 99], 0.0, task="word " * 50)]
    )
    with (run / "log.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": n, "episode/success_rate": 0.5, "time/update": 1}) + "\n" for n in range(4, 300)
        )
    for width in (40, 80):
        assert max(map(len, TerminalView(Run(run), width).text().splitlines())) <= width


def test_a_terminal_obeys_nothing_that_was_written_by_a_model(run):
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
    one = trajectory("one", [evil], 0.0, task=evil)
    one.steps[0].action, one.final_observation = evil, evil
    failed = trajectory("two", [evil], 0.0, "error", error=evil)
    write_jsonl(run / "trajectories" / "train-000004.jsonl", [one, failed])
    for episode in ((1, 1), (2, 1)):
        text = TerminalView(Run(run)).text(4, episode)
        assert "title" in text and not set("\x1b\x07\x9b\r\u202e") & set(text)


def test_the_middle_of_a_long_episode_is_left_out(run):
    write_jsonl(run / "trajectories" / "train-000004.jsonl", [trajectory("one", ["x"] * 5000, 0.0)])
    text = TerminalView(Run(run)).text()
    assert " 30. room x\n     → go 29 [not admissible]\n     (4940 steps are left out)\n4971. room x\n" in text


def test_a_board_keeps_its_lines(run):
    board = "\n".join(["# # # #", "# p o #", "# _ x #", "# # # #"])
    write_jsonl(run / "trajectories" / "train-000004.jsonl", [trajectory("one", [board], 0.0)])
    path = run / "trajectories" / "train-000004.jsonl"
    path.write_text(path.read_text().replace("room # # # #", "# # # #"))
    assert "  1. # # # #\n     # p o #\n     # _ x #\n     # # # #\n     → go 0" in TerminalView(Run(run)).text()
    with_words = trajectory("one", ["x"], 0.0)
    with_words.steps[0].observation = f"{board}\nyou+1+1 box+1+1 goal+0+1"
    write_jsonl(path, [with_words])
    assert "     # # # #\n     you+1+1 box+1+1 goal+0+1\n     → go 0" in TerminalView(Run(run)).text()


def test_an_evaluation_has_tasks(tmp_path):
    folder = tmp_path / "evaluation"
    write_jsonl(
        folder / "trajectories" / "panel-0.jsonl", [trajectory("one", "ha", 10.0), trajectory("two", "h", 0.0)]
    )
    (folder / "settings.json").write_text(json.dumps({"panel": "mine"}))
    text = TerminalView(open_folder(folder)).text()
    assert "Evaluation mine: 50.0 % of 2 episodes solved\n   1 █ 1/1  task one\n   2 · 0/1  task two" in text
    assert "Episode 2.1: failed" in text


def test_the_command_prints_and_refuses_what_has_no_effect(run, capsys):
    main([str(run), "--text", "--iterations", "2", "--episode", "1.1"])
    assert "Episode 1.1: solved, reward 10, 2 steps" in capsys.readouterr().out
    assert not (run / "view.html").exists()
    for episode in ("1.3", "0.1"):
        with refused("episode"):
            main([str(run), "--text", "--episode", episode])
    for flags, field in (
        (["--text", "--serve"], "serve"),
        (["--text", "--iterations", "1", "2"], "text"),
        (["--episode", "1.1"], "episode"),
        (["--text", "--episode", "3"], "episode"),
    ):
        with pytest.raises(SystemExit):
            main([str(run), *flags])
        assert f"error: {field} " in capsys.readouterr().err
