"""The table of `benchmarks/learning/pretrained.py`, and what is kept of a run."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.learning import pretrained as bench
from benchmarks.learning import pretrained_report
from g2po_trl import Trajectory, write_jsonl


def run(method, seed, success, panel):
    rates = [
        {"step": step, "episodes": 96, "success_rate": rate, "won": "1" * int(96 * rate) + "0" * int(96 * (1 - rate))}
        for step, rate in zip((0, 5, 10), panel)
    ]
    attempts = [{"seconds": 1800.0}, {"seconds": 5400.0}]
    training = {"success_rate": success}
    return {"method": method, "seed": seed, "training": training, "panel": rates, "attempts": attempts}


def test_table(tmp_path):
    runs = [
        run("g2po", 0, [0.25] * 5 + [0.5] * 5, (0.25, 0.5, 0.75)),
        run("grpo", 1, [0.25] * 10, (0.25, 0.25, 0.3125)),
    ]
    for one in runs:
        (tmp_path / f"{bench.name_of(one['method'], one['seed'])}.json").write_text(json.dumps(one))
    text = bench.report(tmp_path)
    assert "| g2po | 0 | 25.0 ± 4.4 | 50.0 ± 5.1 | 75.0 ± 4.4 | +50.0 ± 5.1 | 25.0 | 50.0 | 2.0 |" in text
    assert "| grpo | 1 | 25.0 ± 4.4 | 25.0 ± 4.4 | 31.2 ± 4.7 | +6.2 ± 2.5 | 25.0 | 25.0 | 2.0 |" in text
    assert (tmp_path / "table.md").read_text() == text
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("curves", "held_out"))
    assert "- g2po −" not in text, "no seed in common"


def test_means_over_seeds_and_games(tmp_path):
    """By hand, of four games: seeds are averaged first, and games give the error."""

    def played(method, seed, before, after, success):
        run = {"method": method, "seed": seed, "attempts": [{"seconds": 0.0}], "training": {"success_rate": success}}
        run["panel"] = [
            {"step": step, "episodes": 4, "success_rate": won.count("1") / 4, "won": won}
            for step, won in ((0, before), (10, after))
        ]
        (tmp_path / f"{bench.name_of(method, seed)}.json").write_text(json.dumps(run))

    played("g2po", 0, "1000", "1110", [0.5, 0.75])
    played("g2po", 1, "1000", "0100", [0.5, 0.5])
    played("grpo", 1, "1000", "1000", [0.5, 0.25])
    played("g2po lambda 0.5", 2, "1000", "1000", [0.5, 0.5])
    lines = bench.report(tmp_path).splitlines()
    # Changes by game: 0 1 1 0 and -1 1 0 0, together -0.5 1 0.5 0.
    assert "- g2po, 2 seeds: +25.0 ± 32.3 points on held-out games." in lines
    # Of the four runs: -0.25 0.5 0.25 0.
    assert "- All runs: +12.5 ± 16.1 points on held-out games." in lines
    # After training 0100 and 1000: -1 1 0 0. In training 0 and 0.25.
    (against,) = [line for line in lines if " − grpo" in line]
    assert against == (
        "- g2po − grpo, seed 1: +0.0 ± 40.8 points on held-out games after training, +12.5 in training, on "
        "the same tasks."
    )


def test_the_last_panel_is_played_twice_and_midway_is_midway(tmp_path):
    played = run("g2po", 0, [0.25] * 10, (0.25, 0.5, 0.75))
    played["panel"] = [{**played["panel"][0], "step": s, "success_rate": r} for s, r in zip((0, 13, 25, 25), RATES)]
    (tmp_path / "g2po-seed0.json").write_text(json.dumps(played))
    assert "| g2po | 0 | 10.0 ± 3.1 | 20.0 ± 4.1 | n/a |" in bench.report(tmp_path)


RATES = (0.1, 0.2, 0.9, None)


def test_another_command_is_not_taken_for_the_same(tmp_path):
    """Neither a complete run of it nor one under way."""

    def runner(*flags):
        return bench.Runner(tmp_path / "results", tmp_path / "work", 25, flags=flags)

    for folder, field in (("results", "--results"), ("work", "--work")):
        path = tmp_path / folder / ("g2po-seed0.json" if folder == "results" else "g2po-seed0/command.json")
        assert not runner().is_complete("g2po", 0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"command": runner().command("g2po", 0)}))
        assert runner().is_complete("g2po", 0) == (folder == "results")
        with pytest.raises(ValueError, match=f"g2po-seed0.* is of another command, .*: choose another {field}"):
            runner("--learning_rate", "3e-5").is_complete("g2po", 0)
        path.unlink()
    with pytest.raises(ValueError, match="results', where no run is complete: train first"):
        runner().official(tmp_path)


def test_another_start_is_not_taken_for_the_same(tmp_path):
    start = tmp_path / "work/start"
    start.mkdir(parents=True)
    (tmp_path / "results").mkdir()
    (start / "teaching.json").write_text('{"seed": 0}')
    for weights in (b"some", b"some", b"others"):
        (start / "model.safetensors").write_bytes(weights)
        runner = bench.Runner(tmp_path / "results", tmp_path / "work", 25)
        if weights == b"some":
            assert runner.start() == start
    with pytest.raises(ValueError, match="start.json is of another start, .*…, than .*: choose another --results"):
        runner.start()
    assert json.loads((tmp_path / "results/start.json").read_text())["seed"] == 0


def test_an_attempt_is_known_before_its_end(tmp_path):
    """Also if this process does not live to see it."""
    seen, recipe = tmp_path / "seen.json", tmp_path / "recipe.py"
    recipe.write_text(f"import shutil, sys\nshutil.copy(sys.argv[-1] + '/attempts.json', {str(seen)!r})\n")
    runner = bench.Runner(tmp_path, tmp_path, 25)
    attempts = runner.run(tmp_path / "run", [str(recipe)], "abc", resume=False)
    (begun,) = json.loads(seen.read_text())
    assert (begun["commit"], begun["exit"]) == ("abc", None) and attempts[0]["exit"] == 0
    assert len(runner.run(tmp_path / "run", [str(recipe)], "abc", resume=False)) == 2
    # One that ended with its machine has taken the time until its last words.
    (tmp_path / "run/attempts.json").write_text(json.dumps([begun | {"started": 1000}]))
    os.utime(tmp_path / "run/log.txt", (1500, 1500))
    assert runner.run(tmp_path / "run", [str(recipe)], "abc", resume=False)[0]["seconds"] == 500


def test_official_games(tmp_path):
    """By hand, below the runs' lines, the start's first; no run is taken for one of them."""
    seeds = [{"turns": 20.0, "valid": 90.0}, {"turns": 22.0, "valid": 100.0}]
    for role, model, won in (("best", "g2po-seed0", ["1100", "1000"]), ("start", "start", ["1000", "0000"])):
        played = {"model": model, "games": 4, "seeds": seeds, "won": won}
        (tmp_path / f"official-{role}.json").write_text(json.dumps(played))
    (tmp_path / "g2po-seed0.json").write_text(json.dumps(run("g2po", 0, [0.25] * 10, (0.25, 0.5, 0.75))))
    *_, start, best, change, end = bench.report(tmp_path).split("\n")
    about = "4 official games, 2 episodes each"
    assert start == f"- {about}, start: 12.5 ± 12.5, 21.0 turns, 95.0 % of the actions valid."
    assert best == f"- {about}, g2po-seed0: 37.5 ± 23.9, 21.0 turns, 95.0 % of the actions valid."
    assert change == "- Change: +25.0 ± 14.4 points on official games." and end == ""


def test_official_games_are_played_once(tmp_path, monkeypatch):
    """An evaluation that is complete stays as it is, with its seconds."""
    (tmp_path / "g2po-seed0.json").write_text(json.dumps(run("g2po", 0, [0.25] * 10, (0.25, 0.5, 0.75))))
    evaluations, games, really_run = [], tmp_path / "valid_seen", subprocess.run

    def evaluate(command, **options):
        if "evaluate" not in command:
            return really_run(command, **options)
        output = Path(command[command.index("--output") + 1])
        (output / "trajectories").mkdir(parents=True, exist_ok=True)
        (output / "results.json").write_text('{"settings": {"tasks": "24 (abc)"}, "seeds": []}')
        write_jsonl(output / "trajectories/direct-0.jsonl", [])
        return evaluations.append(command[command.index("--model") + 1])

    monkeypatch.setattr(subprocess, "run", evaluate)
    runner = bench.Runner(tmp_path, tmp_path / "work", 25)
    runner.official(games)
    runner.official(games)
    assert evaluations == [str(tmp_path / "work/start"), str(tmp_path / "work/g2po-seed0")]
    played = json.loads((tmp_path / "official-best.json").read_text())
    assert played["games"] == 24 and played["seconds"] is not None and "WORK/g2po-seed0 " in played["command"]
    (tmp_path / "official-best.json").unlink()
    runner.official(games)
    assert evaluations[2:] == [str(tmp_path / "work/g2po-seed0")]
    assert json.loads((tmp_path / "official-best.json").read_text())["seconds"] is None, "resumed"


def test_what_is_kept_of_a_run(tmp_path):
    history = [
        {"episode/success_rate": 0.123456, "episode/turns": 9.0, "time/rollout": 2.0, "step": 1},
        {"eval_success_rate": 0.5, "step": 1},
        {"episode/success_rate": 0.25, "time/rollout": 3.0, "grad_norm": 1.0, "step": 2},
    ]
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[: 2 * step - 1]}))
    entry = {"step": 0, "episodes": 4, "success_rate": 0.5, "success_rate_by_type": {}, "turns": 3.0}
    entry |= {"valid_action_ratio": 1.0, "error_rate": 0.0, "panel": "not kept"}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(entry) + "\n")
    played = [Trajectory(task, [], 10.0 * (task in "bd"), "success" if task in "bd" else "failure") for task in "dcba"]
    write_jsonl(tmp_path / "trajectories/eval-000000.jsonl", played)
    (tmp_path / "run.json").write_text(json.dumps({"versions": {"trl": "1.2.3"}}))
    kept = bench.collected(tmp_path)
    assert kept["training"]["success_rate"] == [0.12346, 0.25] and kept["training"]["turns"] == [9.0, None]
    assert kept["training"]["time/rollout"] == [2.0, 3.0] and kept["training"]["grad_norm"] == [None, 1.0]
    assert kept["versions"] == {"trl": "1.2.3"}, "what played it, not what collects it"
    assert kept["panel"] == [{**{name: value for name, value in entry.items() if name != "panel"}, "won": "0101"}]


@pytest.mark.parametrize(("rate", "shown"), [(0.0, "0.0"), (1.0, "100.0"), (0.5, "50.0 ± 5.0")])
def test_none_won_and_all_won_are_no_certainty(rate, shown):
    assert pretrained_report._with_error(rate, 100) == shown


def test_equal_changes_and_a_few_have_no_error():
    assert pretrained_report._change([0.5]) == pretrained_report._change([0.25, 0.75]) == "+50.0"
    assert pretrained_report._change([1, 1, 1]) == "+100.0" and pretrained_report._change([0, 1, 2]) == "+100.0 ± 57.7"
