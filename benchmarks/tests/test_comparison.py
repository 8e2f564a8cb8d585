"""The comparison of methods: statistics by hand and against scipy, stages, report, and interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.learning import comparison_runs
from benchmarks.learning import comparison_stages as stages
from benchmarks.learning.comparison_report import load, percent, pilot_winner, report
from benchmarks.learning.comparison_runs import Runner, config_of, fingerprint
from benchmarks.learning.comparison_statistics import (
    collapsed,
    critical_value,
    dunnett,
    first_at,
    first_half,
    over_seeds_and_games,
    paired_interval,
    smallest_effect,
)
from g2po_trl.trajectory import Trajectory, write_jsonl

ROOT = stages.ROOT


def numbers(values) -> dict:
    """(arms, seeds) as numbers of runs: arms a, b, c, …"""
    return {("abcdefgh"[arm], seed): float(v) for arm, of in enumerate(values) for seed, v in enumerate(of)}


def test_without_blocks_it_is_scipys_dunnett():
    values = np.random.default_rng(1).normal(size=(4, 6)) + [[0], [2], [0.5], [0]]
    found = dunnett(numbers(values), "a", blocks=False)
    expected = stats.dunnett(*values[1:], control=values[0], random_state=0)
    interval = expected.confidence_interval()
    assert [of.p for of in found.differences.values()] == pytest.approx(list(expected.pvalue), abs=2e-4)
    assert [of.interval[0] for of in found.differences.values()] == pytest.approx(list(interval.low), abs=0.01)
    assert [of.interval[1] for of in found.differences.values()] == pytest.approx(list(interval.high), abs=0.01)
    assert found.freedom == 20 and found.differences["b"].significant and not found.differences["d"].significant


def test_one_arm_in_blocks_is_the_paired_t_test():
    first, second = [0.4, 0.5, 0.3, 0.6, 0.5], [0.5, 0.55, 0.45, 0.62, 0.6]
    found = dunnett(numbers([first, second]), "a")
    expected = stats.ttest_rel(second, first)
    assert found.differences["b"].mean == pytest.approx(0.084) and found.freedom == 4
    assert found.differences["b"].p == pytest.approx(expected.pvalue, abs=1e-4)
    assert found.differences["b"].interval == pytest.approx(tuple(expected.confidence_interval()), abs=1e-4)
    assert paired_interval(np.subtract(second, first)) == pytest.approx(tuple(expected.confidence_interval()))
    assert paired_interval([0.1] * 3) is None and percent([0.1] * 3) == "10.0" and percent([0.0, 1.0]) == "50.0"
    assert percent([0.0, 0.1, 0.2]) == "10.0 ± 10.0"


def test_blocks_take_away_what_seeds_have_in_common():
    """By hand: seeds 0 and 10 apart, residuals of ±0.5 but for the third arm's, 6 values - 4 effects."""
    # Arms' means 5, 6, 8; seeds' means 2 below and above... of [[0, 10], [1, 11], [4, 12]].
    found = dunnett(numbers([[0, 10], [1, 11], [4, 12]]), "a")
    assert [of.mean for of in found.differences.values()] == pytest.approx([1, 3])
    # Residuals by arm: ∓1/3, ∓1/3, ±2/3, so a sum of squares of 4/3 on 2 degrees of freedom.
    assert found.freedom == 2 and found.noise == pytest.approx(np.sqrt(2 / 3))


def test_missing_runs_leave_the_other_differences():
    values = numbers([[0.0, 1.0, 2.0], [1.1, 1.9, 3.0], [0.5, 1.4, 2.6]])
    whole = dunnett(values, "a")
    without = dunnett({key: v for key, v in values.items() if key != ("b", 2)}, "a")
    assert without.freedom == whole.freedom - 1
    # b - (a + c) / 2 is 0.85 and 0.7 in seeds 0 and 1, and c - a is 0.5 in all three.
    assert without.differences["c"].mean == pytest.approx(whole.differences["c"].mean)
    assert without.differences["b"].mean == pytest.approx(0.775 + 0.25)
    assert dunnett({("a", 0): 1.0, ("b", 0): 2.0}, "a") is None, "no degree of freedom"
    assert dunnett({("b", 0): 1.0, ("c", 0): 2.0}, "a") is None, "no reference"
    assert dunnett({("a", 0): 1.0, ("a", 1): 1.2, ("b", 2): 2.0, ("b", 3): 2.1}, "a") is None, "no block in common"


def test_critical_value_and_power():
    # Dunnett's table, two-sided 5 %, 20 degrees of freedom, two and five treatments beside the control.
    assert critical_value((np.eye(2) + 1) / 2, 20) == pytest.approx(2.38, abs=0.005)
    assert critical_value((np.eye(5) + 1) / 2, 20) == pytest.approx(2.73, abs=0.005)
    # One comparison of 16 pairs at noise 1: a paired t test, of which (z_0.975 + z_0.8) √(2 / 16) is a lower bound.
    effect = smallest_effect(1.0, 16, 1)
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 2, 16)) + [[0], [effect]]
    p = stats.ttest_rel(draws[:, 1], draws[:, 0], axis=1).pvalue
    assert 0.99 < effect < 1.1 and np.mean(p < 0.05) == pytest.approx(0.8, abs=0.02)


def test_interval_over_seeds_and_games_by_hand():
    # Rows 0 and 1, columns 0, 0.5, 1: no rest. MS_seed = 3 / 2 (row means 0.5 apart of each other by 1: variance 0.5).
    differences = np.array([[0.0, 0.5, 1.0], [1.0, 1.5, 2.0]])
    mean, (low, high) = over_seeds_and_games(differences)
    variance = (3 * 0.5 + 2 * 0.25) / 6
    assert mean == 1.0
    assert high - mean == pytest.approx(stats.t.ppf(0.975, 1) * np.sqrt(variance)) and mean - low == pytest.approx(
        high - mean
    )
    # Games that differ by less than chance lets them: seeds alone.
    mean, (low, high) = over_seeds_and_games(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert mean == 0.5 and (low, high) == (0.5, 0.5)


def test_numbers_of_a_run():
    assert first_half([0.1, 0.2, 0.3, 0.9]) == pytest.approx(0.15) and first_half([0.1, 0.2, 0.9]) == pytest.approx(
        0.15
    )
    assert first_at([0.7, 0.8, 0.8, 0.8, 0.2]) == 4 and first_at([0.9, 0.6, 0.9, 0.0]) == 3
    assert first_at([0.7] * 9) is None and first_at([0.9, 0.9]) is None
    assert not collapsed({"valid": [1.0, 0.95], "kl": [None, 0.5]}) and not collapsed({})
    assert collapsed({"valid": [1.0, 0.94, 1.0]}) and collapsed({"valid": [1.0], "kl": [0.1, 0.51]})


def test_stages_are_balanced_and_name_no_run_twice():
    jobs = stages.jobs_of(stages.ALL, "LoRA")
    assert max(Counter(job.key for job in jobs).values()) == 1
    assert max(Counter((job.stage, job.name) for job in jobs).values()) == 1, "two runs would share a file"
    main = [job for job in jobs if job.stage == "main"][1:]
    assert len(main) == 8 * 12 and [job.seed for job in main] == sorted(job.seed for job in main)
    assert [job.arm for job in main[:8]] == list(stages.ARMS)
    order = list(dict.fromkeys(job.stage for job in jobs))
    assert order == list(stages.ALL) and order[:4] == ["main", "treasure", "rates", "methods"]
    assert not [j for j in stages.jobs_of(stages.ALL, None) if j.stage in stages.AFTER_PILOT], (
        "the pilot decides first"
    )
    for job in jobs:
        if job.words:
            assert (ROOT / job.words[0]).is_file() and config_of(job)
    (half, twice) = ([w for w in j.words if w.endswith("e-05") or w.startswith("0.0")] for j in stages.rates()[1::-1])
    assert float(twice[0]) == pytest.approx(4 * float(half[0]))


def test_a_run_with_other_flags_or_panels_is_another_run():
    job, other = stages.alfworld("main", "g2po", 100), stages.alfworld("main", "gigpo", 100)
    same = fingerprint(job, job.words, "c", "t")
    assert same == fingerprint(stages.alfworld("main", "g2po", 101), job.words, "c", "t")
    assert len({same, fingerprint(other, other.words, "c", "t"), fingerprint(job, job.words, "d", "t")}) == 3
    assert fingerprint(job, job.words, "c", "t2") != same


def run(stage, arm, seed, success, held_out, until=None, games="10"):
    """The file of a run, without what no table reads."""
    panel = {"games": "g", "won": [games, games], "success_rate": [held_out, held_out], "turns_to_success": [6.0, 8.0]}
    graph = {"steps": [4, 6] + [0] * 18, "deviations": [1, 0, 2] + [0] * 9, "revisited": 6}
    training = {"success": success, "valid": [1.0] * len(success), "kl": [0.1] * len(success)}
    training |= {"group_size": [2.0] * len(success), "turns_to_success": [7.0] * len(success)}
    training |= {"time_update": [3.0] * len(success), "time_advantage": [1.0] * len(success)}
    about = {
        "stage": stage,
        "arm": arm,
        "seed": seed,
        "commit": "0123456789abcdef",
        "seconds": 3600,
        "cpu_seconds": 3600,
    }
    about |= {"iterations": len(success), "training": training, "graphs": {"first": graph, "last": graph}}
    return about | {"held_out": [{"until": until, "1": panel, "0.4": panel}]}


def write(results, *runs):
    for one in runs:
        path = results / "runs" / one["stage"] / f"{one['arm'].replace(' ', '-')}-seed{one['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


def test_report(tmp_path):
    """Nothing is tested before the last run of the main stage; then the tests are there, and all figures."""
    assert report(tmp_path) == "No run yet."
    rng = np.random.default_rng(0)
    level = {"g2po λ 0.5": 0.55, "g2po": 0.5, "gigpo": 0.4, "g2po without A_NC": 0.5}
    runs = [run("main", "start", 100, [0.2], 0.25)]
    for arm in stages.ARMS:
        for seed in stages.SEEDS["main"]:
            success = level.get(arm, 0.45) + 0.02 * rng.normal(size=4)
            runs.append(run("main", arm, seed, success.tolist(), float(success[-1])))
    runs[1]["training"]["kl"][2] = 0.9
    write(
        tmp_path, *runs[:-1], run("webshop", "g2po", 100, [0.1, 0.2], 0.3), run("weights", "w 2", 101, [0.1, 0.2], 0.3)
    )
    prompted = run("prompted", "react", 0, [0.0], 0.25)
    prompted["held_out"][-1]["0.4"] |= {"valid_action_ratio": [0.5], "turns": [14.0]}
    write(tmp_path, run("treasure", "grpo", 100, [0.5, 0.8, 0.85, 0.8], 0.8), prompted)
    write(tmp_path, run("weights", "w 0.25", 101, [0.1, 0.2], 0.3))
    text = report(tmp_path)
    assert "| react | 2 | 25.0 | 50.0 | 14.0 |" in text
    assert text.index("| w 0 |") < text.index("| w 0.25 |") < text.index("| w 1 |") < text.index("| w 2 |")
    assert "1 runs are missing: no test" in text and "Dunnett" not in text
    assert "| grpo | 3 |" not in text and "| w 0 | 3 |" in text, "what other stages borrow is the main stage's"
    assert "| g2po | 12 | " in text and "| 1 (seed 100) |" in text
    assert "| grpo | 4 | 73.8 | 81.7 |" in text, "iterations to 80 %"
    write(tmp_path, runs[-1])
    text = report(tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert set(found) == {
        f"{n}, {w}" for n in ("first half", "training and held-out") for w in ("all runs", "without collapsed runs")
    }
    whole, without = found["first half, all runs"], found["first half, without collapsed runs"]
    assert (whole["degrees_of_freedom"], without["degrees_of_freedom"]) == (77, 76)
    assert whole["differences"]["gigpo"]["mean"] == pytest.approx(-0.1, abs=0.02)
    assert whole["differences"]["gigpo"]["p"] < 0.001 < 0.05 < whole["differences"]["g2po without A_NC"]["p"]
    assert "| gigpo | -1" in text and "| < 0.001 | yes |" in text
    assert text.count("with probability 0.8") == 2, "said of complete blocks alone"
    for name in ("curves-main", "curves-webshop", "differences", "paper", "sweep-w"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    runs[-1]["held_out"][-1]["1"]["games"] = "others"
    write(tmp_path, runs[-1])
    with pytest.raises(ValueError, match="different held-out games"):
        report(tmp_path)


def test_of_several_trials_of_a_task_the_last_counts(tmp_path):
    (tmp_path / "panels").mkdir()
    (tmp_path / "panels" / "panel.jsonl").write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    trials = [("b", "failure", True), ("a", "failure", False), ("a", "success", True)]
    played = [Trajectory(task, [], 0.0, outcome, info={"last_trial": last}) for task, outcome, last in trials]
    write_jsonl(tmp_path / "trajectories" / "reflexion-0.jsonl", played)
    panel = comparison_runs.panel_of(tmp_path)
    assert (panel["won"], panel["success_rate"]) == (["10"], [0.5])


def test_the_pilot_decides_and_a_run_ends_where_it_was_to_come(tmp_path, monkeypatch):
    assert pilot_winner(tmp_path) is None
    write(tmp_path, run("smollm2-pilot", "LoRA", 100, [0.3], 0.35, 12))
    assert pilot_winner(tmp_path) is None
    write(tmp_path, run("smollm2-pilot", "full weights", 100, [0.3], 0.31, 12))
    assert pilot_winner(tmp_path) == "LoRA"
    (job,) = [j for j in stages.jobs_of(["smollm2"], "LoRA") if j.key == ("smollm2", "grpo", 101)]
    assert "--use_peft" in job.words and job.words[-1] == "grpo" and job.until == (15, 30, 45, 60)
    runner = Runner(tmp_path, tmp_path)
    write(tmp_path, run("smollm2", "start", 100, [0.3], 0.3))
    assert not runner.is_over(job, tmp_path, {"1": {"success_rate": [0.49, 0.5]}})
    assert runner.is_over(job, tmp_path, {"1": {"success_rate": [0.5, 0.5]}})
    assert not runner.is_over(stages.alfworld("main", "g2po", 100), tmp_path, {"1": {"success_rate": [1.0]}})
    game = stages.treasure()[0]
    for success, over in (([0.7, 0.8, 0.8], False), ([0.8, 0.8, 0.8], True)):
        monkeypatch.setattr(comparison_runs, "trained", lambda folder, of=success: {"training": {"success": of}})
        assert runner.is_over(game, tmp_path, {}) == over


@pytest.mark.slow
def test_what_was_killed_goes_on_and_nothing_is_played_twice(tmp_path):
    """The real recipe, the smallest runs: kill -9 of the command and of its run in the first iteration."""
    words = [sys.executable, "-m", "benchmarks.learning.comparison", "--smoke", "--stages", "main"]
    words += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--minutes"]
    begun = subprocess.Popen([*words, "9"], stdout=subprocess.DEVNULL, start_new_session=True)
    folder = tmp_path / "work/main"
    deadline = time.time() + 400
    while not list(folder.glob("g2po-seed100-*/checkpoint-1/trainer_state.json")):
        assert time.time() < deadline and begun.poll() is None
        time.sleep(0.2)
    begun.kill()
    begun.wait()
    (run_folder,) = folder.glob("g2po-seed100-*")
    log = run_folder / "log.txt"
    for process in Path("/proc").glob("[0-9]*"):  # the run lives on: its machine is to end, too
        try:
            if str(run_folder) in (process / "cmdline").read_text():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue
    (start,) = (tmp_path / "results/runs/main").glob("*.json")
    written, said = start.stat().st_mtime_ns, log.read_text()
    done = subprocess.run([*words, "0.05"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "main, g2po, seed 100: complete" in done.stdout, done.stdout[-3000:] + done.stderr
    resumed = log.read_text()[len(said) :]
    assert "iteration   2/2" in resumed and "iteration   1/2" not in resumed
    assert start.stat().st_mtime_ns == written, "it was complete"
    one = load(tmp_path / "results")["main", "g2po", 100]
    assert one["iterations"] == 2 and len(one["training"]["success"]) == 2
    assert [attempt["exit"] for attempt in one["attempts"]] == [None, 0, 0, 0]
    assert {len(won) for won in one["held_out"][-1]["1"]["won"]} == {6} and len(one["held_out"][-1]["1"]["won"]) == 2
