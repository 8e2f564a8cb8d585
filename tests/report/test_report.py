"""The lines and numbers of a report by hand, and the whole of a run's analysis.json."""

import json
from functools import partial
from pathlib import Path

import numpy as np
from letter_graphs import episode

from g2po_trl import StateGraph, Trajectory, write_jsonl
from g2po_trl.cli.commands.report import main
from g2po_trl.report.losses import UNBROKEN, in_short, losses
from g2po_trl.report.plain import five_lines
from g2po_trl.report.summary import analyse
from g2po_trl.runs.iterations import Iteration

GOLDEN = Path(__file__).with_name("analysis.json")
rounded = partial(json.loads, parse_float=lambda text: float(f"{float(text):.6g}"))


def test_the_numbers_of_a_run(tmp_path):
    """The whole of analysis.json, as it was when each of its parts had been checked by hand."""
    rng = np.random.default_rng(0)

    def play(task):
        return episode("".join(rng.choice(list("abcd"), 5)), 10.0 * (rng.random() < 0.5), task)

    for iteration in (1, 2):
        for rank in (0, 1):
            path = tmp_path / "trajectories" / f"train-{iteration:06d}-rank{rank}.jsonl"
            write_jsonl(path, [play(task) for task in "xxyy"])
    main([str(tmp_path), "--details"])
    found, golden = (rounded(path.read_text()) for path in (tmp_path / "report" / "analysis.json", GOLDEN))
    assert found == golden
    main([str(tmp_path), "--gamma", "0.5", "--output", str(tmp_path / "other")])
    assert rounded((tmp_path / "other" / "analysis.json").read_text())["gamma"] == 0.5


def lines_of(*rollouts, run=None, evaluations=()):
    """The five lines of iterations, as name -> text."""
    iterations = [Iteration(number, groups) for number, groups in enumerate(rollouts, 1)]
    numbers = analyse(iterations, None, run or {})
    said = five_lines(iterations, numbers, run or {}, evaluations).splitlines()
    starts = [i for i, line in enumerate(said) if line[0] != " "]
    parts = [" ".join(" ".join(said[a:b]).split()) for a, b in zip(starts, [*starts[1:], None])]
    names = ("Success", "Failures", "Recurrence", "Verdict", "What to do")
    assert all(part.startswith(name) for name, part in zip(names, parts, strict=True))
    return {name: part.removeprefix(name).strip() for name, part in zip(names, parts)}


def test_the_five_lines_by_hand():
    """Two iterations of six groups: success 0 of 12, then 9 of 12; fifteen lost episodes, three of them early."""
    lost, early, won = episode("aba", 0.0, outcome="truncated"), episode("abc", 0.0), episode("ab", 10.0)
    for step, listed in zip(lost.steps, (["go"], ["stay"], ["stay"])):
        step.action, step.admissible_actions = "go", listed
    evaluations = [{"name": "eval", "step": 0, "success_rate": 0.25, "episodes": 4}]
    evaluations.append({"name": "eval", "step": 2, "success_rate": 0.5, "episodes": 4})
    rollouts = [[lost, lost], [lost, early]] * 3, [[won, won], [won, lost]] * 3
    said = lines_of(*rollouts, evaluations=evaluations)
    rates = "0.0 % in iteration 1, 75.0 % in iteration 2. Evaluation: 25.0 %, then 50.0 % of 4 episodes."
    assert said["Success"] == rates
    failed = "0 of 6 groups failed in every episode in iteration 2. Of 3 failed episodes: 100 %"
    assert said["Failures"].startswith(failed)
    assert "67 % of actions were not admissible, 50 % of steps returned to an earlier state." in said["Failures"]
    # 1 of 14, by Agresti and Coull, and 10 of 14: more than the groups' 0 and 0.11. sqrt((0.066 + 0.204) / 14) = 0.139
    assert said["Verdict"].startswith("It learned: +75.0 ± 13.9 points")
    assert said["What to do"].startswith("Continue while evaluations rise")
    fell = lines_of(*reversed(rollouts))
    assert fell["Verdict"].startswith("Success fell: -75.0") and fell["What to do"].startswith(
        "Lower the learning rate"
    )


def test_tasks_that_are_never_won_and_the_steps_that_lose():
    """V(h) = 4, V(k) = 8, V(c) = 0: at c, entered from h, the state is worth 4 less; the turn limit takes 8 from k."""
    won, lost = episode("hk", 8.0, "x"), episode("hc", 0.0, "x")
    cut, never = episode("hk", 0.0, "x", outcome="truncated"), [episode("ab", 0.0, "y"), episode("ac", 0.0, "y")]
    lost.steps[0].action = "go down"
    groups = [[won, won, lost, lost, lost, cut, episode("hc", 8.0, "x", "error")], [*never, never[1]]]
    for group in groups:
        for one in group:
            one.row, one.task = {"name": one.task_id, "api_key": "k3y"}, "tidy up"
    found = losses([Iteration(7, groups)], [StateGraph.from_groups(groups, 1.0)])
    assert (found["tasks"], found["lost"]) == (2, 4)
    assert found["turning_points"] == [
        {"state": "h", "action": "go down", "episodes": 3},
        {"state": "k", "action": "the turn limit", "episodes": 1},
    ]
    (task,) = found["never_won"]
    assert (task["row"]["name"], task["episodes"], task["ends"]) == ("y", 3, [["c", 2], ["b", 1]])
    assert (task["iteration"], task["episode"]) == (7, "2.3")
    command = "g2po view runs/x --text --episode 2.3 --iterations 7"
    assert command in in_short(found, "runs/x").replace(UNBROKEN, " ")


def test_no_lost_episode_is_left_out():
    """Neither one without a step nor one whose V never falls."""
    too_long = Trajectory("y", [], 0.0, "failure", failure_reason="too long: 9 tokens", row={"name": "y"})
    groups = [[episode("hk", 8.0, "x"), episode("hk", 8.0, "x", outcome="failure")], [too_long, too_long]]
    found = losses([Iteration(1, groups)], [StateGraph.from_groups(groups, 1.0)])
    assert (found["tasks"], found["lost"], found["turning_points"]) == (2, 1, [])
    assert [one["ends"] for one in found["never_won"]] == [[["no step: too long: 9 tokens", 2]]]
