"""Every metric of docs/metrics.md, recomputed by other code from what small runs wrote and what their losses saw.

`metrics_by_hand` has the other code, `recorded_runs` the runs. A metric that is documented and never logged, that is
logged and not documented, or that is not recomputed fails.
"""

import math
import re
from pathlib import Path

import metrics_by_hand as by_hand
import pytest
from recorded_runs import RUNS, TRIALS, make_recorded

from g2po_trl import Step, Trajectory
from g2po_trl.runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
RECOMPUTED = ("slices", "dynamic", pytest.param("several", marks=pytest.mark.slow))  # others show the names
OTHERWISE_TESTED = ("time/", "advantage/")
OF_TRANSFORMERS = {"epoch", "step", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
OF_TRANSFORMERS |= {"train_loss", "total_flos"}
OF_TOOLS = {f"{of}{name}_call_ratio" for of in ("episode/", "eval_") for name in ("tool", "readable", "known")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model_dir):
    """Each run by its name, made when it is first asked for."""
    made, patch = {}, pytest.MonkeyPatch()

    def run(name):
        if name not in made:
            made[name] = make_recorded(name, tiny_model_dir, tmp_path_factory.mktemp(name) / "run", patch)
            try:
                made[name].trainer.train()
            finally:
                patch.undo()
        return made[name]

    yield run
    for one in made.values():
        one.trainer.close()


def iterations_of(run):
    """(number, all that was logged of it), from the log lines up to the next iteration's."""
    found = {}
    for entry in run.trainer.state.log_history:
        if "loss" in entry:
            number = math.ceil(entry["step"] / run.args.optimizer_steps_per_iteration)
            found.setdefault(number, {}).update(entry)
    return found


def expected(run, number):
    """Every metric of an iteration but seconds, by name."""
    args, folder = run.args, Path(run.args.output_dir)
    rollouts = {n: by_hand.Rollout(folder, n, args.num_generations) for n in iterations_of(run)}
    rollout = rollouts[number]
    logged = iterations_of(run)[number]
    found = {f"episode/{name}": value for name, value in by_hand.episode_metrics(rollout.all).items()}
    found["episode/tasks_set_aside"] = len(set_aside(rollouts, number, args.task_error_patience))
    found |= by_hand.graph_metrics(rollout, args.gamma) | by_hand.cost_metrics(rollout)
    found["rollout/active_fraction"] = logged["rollout/active_fraction"]  # by hand in tests/rollout
    first_steps = run.passes[number][0]["step"] + args.steps_per_generation
    once = [one for one in run.passes[number] if one["step"] < first_steps]
    found |= by_hand.update_metrics(rollout, args.beta, once)
    found |= of_losses(run, rollout, number)
    found["update/optimizer_steps"] = len(run.norms) / len(rollouts)
    step = logged["step"]
    found["grad_norm"] = run.norms[step - 1]
    found["learning_rate"] = args.learning_rate * (1 - (step - 1) / args.max_steps)
    return found


def set_aside(rollouts, number, patience):
    """Tasks of nothing but errors in so many rollouts in a row."""
    failed = {}
    for n in range(1, number + 1):
        played = {}
        for t in rollouts[n].all:
            played.setdefault(t["task_id"], []).append(t["outcome"] == "error")
        for task, errors in played.items():
            failed[task] = failed.get(task, 0) + 1 if all(errors) else 0
    return {task for task, count in failed.items() if count >= patience}


def of_losses(run, rollout, number):
    """`loss`, `kl`, `entropy` and `clip_ratio/*` of all passes over a rollout."""
    args, losses = run.args, run.losses[number]
    start = losses[0]["step"]
    rows = [(loss["step"], row) for loss in losses for row in loss["rows"]]
    for kind, steps in (("logps", {loss["step"] for loss in losses}), ("old", [start]), ("reference", [0])):
        for at in steps:
            model = run.model_of(at)
            for step, row in rows:
                if kind != "logps" or step == at:
                    row[kind], row[f"entropy of {kind}"] = by_hand.score(model, row)
    for _, row in rows:
        row["entropy"] = row["entropy of logps"]
    num_tokens = args.num_iterations * sum(len(step["completion_ids"]) for step in rollout.steps)
    return by_hand.loss_metrics([row for _, row in rows], args.beta, args.epsilon, num_tokens)


def check(logged, recomputed, where):
    """Every logged number is the recomputed one, and none of the recomputed is missing."""
    named = {name for name in logged if not name.startswith(OTHERWISE_TESTED) and name not in OF_TRANSFORMERS}
    defined = {name for name, value in recomputed.items() if not math.isnan(value)}
    assert {name for name in named if not math.isnan(logged[name])} == defined, where
    wanted = pytest.approx({name: recomputed[name] for name in defined}, rel=1e-4, abs=1e-5)
    assert {name: logged[name] for name in defined} == wanted, where


@pytest.mark.parametrize("name", RECOMPUTED)
def test_an_iterations_metrics(runs, name):
    """Errors, failures with reasons, truncations, prompts that were cut, clipped ratios, states visited once, …"""
    run = runs(name)
    iterations = iterations_of(run)
    assert len(iterations) == run.args.max_steps / run.args.optimizer_steps_per_iteration
    for number, logged in iterations.items():
        check(logged, expected(run, number), f"{name}, iteration {number}")


def test_an_evaluations_metrics(runs):
    run, panel = runs("slices"), TRIALS[:5]
    rows = [row for row in panel for _ in range(run.args.num_generations_eval)]
    evaluations = [entry for entry in run.trainer.state.log_history if "eval_success_rate" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6, 8]
    for entry in evaluations:
        played = by_hand.lines_of(Path(run.args.output_dir, "trajectories", f"eval-{entry['step']:06d}.jsonl"))
        found = by_hand.episode_metrics(played)
        for kind in {row["task_type"] for row in rows}:
            of_kind = [t for t, row in zip(played, rows, strict=True) if row["task_type"] == kind]
            found[f"success_rate/{kind}"] = by_hand.episode_metrics(of_kind)["success_rate"]
        logged = dict(entry)
        assert logged.pop("eval_runtime") > 0
        check(logged, {f"eval_{name}": value for name, value in found.items()}, entry["step"])


def test_ranks_sums_merge_to_the_means_of_all_episodes_also_of_a_metric_of_texts(monkeypatch):
    """One row defines a metric: in training, where ranks exchange sums alone, it is what it is in an evaluation."""
    longest = metrics.Metric("longest_action", lambda t: [max(len(step.action) for step in t.steps or [Step("", "")])])
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, longest))
    played = [
        *(Trajectory(f"t{n % 6}", [Step("o", "go" * n)] * (n % 3), 0.1 * n, "success") for n in range(9)),
        Trajectory(
            "t1", [Step("o", "wait", admissible_actions=["wait"], call="known")], 0, "failure", environment="b"
        ),
        Trajectory("t2", [], 0.0, "failure", failure_reason="token limit: 9", environment="a"),
        *(Trajectory("t3", [], 0.0, outcome, environment="c") for outcome in ("error", "lost")),
    ]
    for n in range(9):
        played[n].info["score"] = n
    kinds = [("even", None, "odd")[n % 3] for n in range(len(played))]
    whole = metrics.summarize(played, kinds)
    assert whole["longest_action"] == (4 + 2 * sum(n for n in range(9) if n % 3)) / 11
    for size in (1, 5):
        parts = [metrics.Summary.of(played[i : i + size], kinds[i : i + size]) for i in range(0, len(played), size)]
        merged = metrics.Summary.merge(parts).means()
        assert merged.keys() == whole.keys() and repr(merged["by_environment"]) == repr(whole["by_environment"])
        assert metrics.flat(merged) == pytest.approx(metrics.flat(whole), nan_ok=True)


def documented():
    """Name -> regular expression, of the first columns of the page's tables."""
    rows = re.sub(r"\n  ", " ", PAGE.read_text(encoding="utf-8")).splitlines()
    names = [name for row in rows if row.startswith("- `") for name in re.findall("`([^`]+)`", row.partition(": ")[0])]
    assert len(names) == len(set(names)) > 80
    return {name: re.sub(r"…|<\w+>", ".+", name) for name in names}


def test_what_is_logged_is_documented_and_the_other_way_round(runs):
    history = [entry for name in RUNS for entry in runs(name).trainer.state.log_history]
    logged = {name for entry in history for name in entry} - OF_TRANSFORMERS
    patterns = documented()
    unknown = {name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns.values())}
    assert not unknown, "logged, but not documented"
    gone = {name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in logged)}
    assert gone == OF_TOOLS, "documented, but not logged by any of these runs (letters call no tools)"
