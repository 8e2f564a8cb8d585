"""The comparison of methods: statistics by hand and against scipy, stages, report, and runs that are resumed."""

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

from benchmarks import figures
from benchmarks.common import RESULTS, ROOT
from benchmarks.learning import comparison, stages
from benchmarks.learning.comparison import Busy, Runner, append, fingerprint, load, lock, percent, pilot_winner, report
from benchmarks.learning.statistics import (
    collapsed,
    critical_value,
    dunnett,
    first_at,
    first_half,
    paired_interval,
    smallest_effect,
)
from g2po_trl import StateGraph, Step, Trajectory, write_jsonl


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
    assert max(Counter((job.stage, job.name) for job in jobs).values()) == 1, "two runs would share a folder"
    main = [job for job in jobs if job.stage == "main"][1:]
    assert len(main) == 8 * 12 and [job.seed for job in main] == sorted(job.seed for job in main)
    assert [job.arm for job in main[:8]] == list(stages.ARMS)
    assert list(dict.fromkeys(job.stage for job in jobs)) == list(stages.ALL)
    assert not [j for j in stages.jobs_of(stages.ALL, None) if j.stage in stages.AFTER_PILOT], "the pilot decides"
    known = {
        (stage, arm, seed)
        for stage, arms in load(RESULTS / "comparison").items()
        for arm in arms
        for seed in arms[arm]
    }
    assert {("main", "g2po λ 0.5", 100), ("rates", "grpo, learning rate × ½", 102)} < known & {job.key for job in jobs}
    half, twice = (float(job.words[-1]) for job in stages.rates()[1::-1])
    assert twice == pytest.approx(4 * half)


def test_a_run_with_other_flags_or_panels_is_another_run():
    job, other = stages.alfworld("main", "g2po", 100), stages.alfworld("main", "gigpo", 100)
    assert fingerprint(job, "t") == fingerprint(stages.alfworld("main", "g2po", 101), "t")
    assert len({fingerprint(job, "t"), fingerprint(other, "t"), fingerprint(job, "t2")}) == 3


def run(stage, arm, seed, success, held_out, until=None):
    """The line of a run, without what no table reads."""
    panel = {"games": "g", "won": ["10", "10"], "success_rate": [held_out, held_out]}
    graph = {"steps": [4, 6] + [0] * 18, "deviations": [1, 0, 2] + [0] * 9, "revisited": 6}
    curves = {"valid": 1.0, "kl": 0.1, "group_size": 2.0, "turns_to_success": 7.0, "time_update": 3.0}
    training = {"success": success, **{name: [value] * len(success) for name, value in curves.items()}}
    about = {"stage": stage, "arm": arm, "seed": seed, "training": training, "graphs": {"first": graph, "last": graph}}
    return about | {"held_out": [{"until": until, "1": panel, "0.4": panel}]}


def write(results, *runs):
    for one in runs:
        append(results / "runs.jsonl.gz", one)


def test_report(tmp_path, monkeypatch):
    """Nothing is tested before the last run of the main stage; then the tests are there, and the figures."""
    rng = np.random.default_rng(0)
    level = {"g2po λ 0.5": 0.55, "g2po": 0.5, "gigpo": 0.4, "g2po without A_NC": 0.5}
    runs = [run("main", "start", 100, [0.2], 0.25)]
    for arm in stages.ARMS:
        for seed in stages.SEEDS["main"]:
            success = level.get(arm, 0.45) + 0.02 * rng.normal(size=4)
            runs.append(run("main", arm, seed, success.tolist(), float(success[-1])))
    runs[1]["training"]["kl"][2] = 0.9
    write(tmp_path, *runs[:-1], run("webshop", "g2po", 100, [0.1, 0.2], 0.3))
    write(tmp_path, *(run("weights", f"w {w}", 101, [0.1, 0.2], 0.3) for w in (2, 0.25)))
    write(tmp_path, run("treasure", "grpo", 100, [0.5, 0.8, 0.85, 0.8], 0.8))
    with monkeypatch.context() as without_figures:
        without_figures.setattr(figures, "save", lambda *given: None)
        text = report(tmp_path)
    assert text.index("| w 0 |") < text.index("| w 0.25 |") < text.index("| w 1 |") < text.index("| w 2 |")
    assert "1 runs are missing: no test" in text and "Dunnett" not in text
    assert "| grpo | 3 |" not in text and "| w 0 | 3 |" in text, "what other stages borrow is the main stage's"
    assert "| iterations to 80 % |" in text and "| 4 | 0 |" in text
    write(tmp_path, runs[-1])
    text = report(tmp_path)
    assert "77 degrees of freedom" in text and "76 degrees of freedom" in text and "| < 0.001 |" in text
    assert text.count("with probability 0.8") == 2, "said of complete blocks alone"
    for name in ("curves-main", "curves-webshop", "paper"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_of_several_trials_of_a_task_the_last_counts(tmp_path):
    (tmp_path / "panels").mkdir()
    (tmp_path / "panels" / "panel.jsonl").write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    trials = [("b", "failure", True), ("a", "failure", False), ("a", "success", True)]
    played = [Trajectory(task, [], 0.0, outcome, info={"last_trial": last}) for task, outcome, last in trials]
    write_jsonl(tmp_path / "trajectories" / "reflexion-0.jsonl", played)
    panel = comparison.panel_of(tmp_path)
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
    for success, over in (([0.7, 0.8, 0.8], False), ([0.8, 0.8, 0.8], True)):
        monkeypatch.setattr(figures, "record_of", lambda folder, of=success: {"training": {"success": of}})
        assert runner.is_over(stages.treasure()[0], tmp_path, {}) == over


def test_a_run_that_another_process_plays_is_busy(tmp_path):
    with lock(tmp_path / "lock"), pytest.raises(Busy), lock(tmp_path / "lock"):
        pass
    with lock(tmp_path / "lock"):
        pass


def test_histograms_by_hand():
    """h: returns 2 and 0 (deviation sqrt 2); k: 4 and 4; b: once."""

    def episode(keys, reward):
        return Trajectory("t", [Step(key, "go") for key in keys], reward, "success" if reward else "failure")

    graph = StateGraph.from_groups([[episode("hk", 8.0), episode("hb", 0.0), episode("k", 8.0)]], 0.5)
    found = figures.histograms([graph])
    assert found["steps"][:3] == [1, 4, 0] and found["deviations"][:4] == [0, 0, 1, 0] and found["revisited"] == 2


@pytest.mark.slow
def test_what_was_killed_goes_on_and_nothing_is_played_twice(tmp_path):
    """The real recipe, the smallest runs: kill -9 of the command and of its run in the first iteration."""
    words = [sys.executable, "-m", "benchmarks.learning.comparison", "--smoke", "--stages", "main"]
    words += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--minutes"]
    begun = subprocess.Popen([*words, "9"], stdout=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)
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
    assert list(load(tmp_path / "results")["main"]) == ["start"]
    said = log.read_text()
    done = subprocess.run([*words, "0.05"], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0 and "main, g2po, seed 100\n" in done.stdout, done.stdout[-3000:] + done.stderr
    assert "main, start" not in done.stdout, "it was complete"
    resumed = log.read_text()[len(said) :]
    assert "iteration   2/2" in resumed and "iteration   1/2" not in resumed
    one = load(tmp_path / "results")["main"]["g2po"][100]
    assert one["iterations"] == 2 and len(one["training"]["success"]) == 2
    assert [attempt["exit"] for attempt in json.loads((run_folder / "attempts.json").read_text())] == [0, 0, 0]
    assert {len(won) for won in one["held_out"][-1]["1"]["won"]} == {6} and len(one["held_out"][-1]["1"]["won"]) == 2
