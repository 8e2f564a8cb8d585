"""A game or an agent of one's own: from `g2po init` on, each command names the next one, and the game is learned."""

import json
import re
import shlex

import programs
import pytest

SHORT = " --num_environment_workers 1 --max_turns 2 --max_completion_length 4"
FEW = {
    "teach": "--max_steps 1 --num_episodes 8 --num_validation_episodes 2 --num_environment_workers 1",
    "train": "--max_steps 1 --per_device_train_batch_size 8 --num_eval_tasks 2" + SHORT,
    "evaluate": "--limit 2 --seeds 1" + SHORT,
    "view": "--no-open",
}


def follow(folder, *more, flags):
    """Run `g2po init` and then what each command says is next; return command -> (words, what it printed)."""
    said, outputs = run("init", folder.name, *more, cwd=folder.parent), {}
    assert said.splitlines()[-1] == f"Next: cd {folder.name} && g2po check"
    words = ["check"]
    while words and words[0] not in outputs:
        outputs[words[0]] = words, run(*words, *flags.get(words[0], "").split(), cwd=folder)
        following = re.findall(r"^(?:Next|Or): g2po ([^,\n]*)", outputs[words[0]][1], re.MULTILINE)
        words = shlex.split(following[-1]) if following else []
    return outputs


def run(*words, cwd):
    done = programs.run("-m", "g2po_trl.__main__", *words, cwd=cwd, timeout=None)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("more", "named", "played"),
    [([], "environment.py:TidyEnvironment", "TidyEnvironment"), (["--agent"], "--agent agent.py:tidy", "tidy")],
)
def test_each_command_names_the_next(tmp_path, more, named, played):
    outputs = follow(tmp_path / "tidy", *more, flags=FEW)
    assert [" ".join(words) for words, _ in outputs.values()] == [
        "check",
        f"teach {named.partition(':')[0]}" if more else "teach",
        f"train {named} --model runs/tidy-start",
        "evaluate --model runs/tidy --seeds 3",
        f"view evaluations/{played}-direct-tidy",
    ]
    assert "8 of 8 demonstrations succeed" in outputs["teach"][1] and "_options" not in outputs["evaluate"][1]
    assert "Evaluation tasks, 2 episodes" in outputs["train"][1]
    described = json.loads((tmp_path / "tidy" / "runs" / "tidy" / "run.json").read_text())["environment"]
    name = described["kwargs"]["agent"] if more else described["import"]
    assert name == f"{{run}}/../../{named.removeprefix('--agent ')}"
    *lines, _ = outputs["check"][1].splitlines()
    assert {line.split()[0] for line in lines if line[0] != " "} == {"ok"}, lines
    assert more or "of 40 episodes; 9 end within 7 turns" in outputs["check"][1], "max_turns of config.yaml"
    tests = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "tidy")
    assert tests.returncode == 0 and f"{7 if more else 4} passed" in tests.stdout, tests.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "--agent", "--coding"])
def test_it_is_learned(tmp_path, kind):
    """As a user types it: from below 60 % of the held-out tasks to 90 % or more.

    A coding agent on functions that it is not trained on: 49 to 67 % of 72 episodes (docs/agents.md), here of 24.
    """
    outputs = follow(tmp_path / "tidy", *kind.split(), flags={"view": "--no-open"})
    assert list(outputs) == ["check", "teach", "train", "evaluate", "view"]
    assert "% reached. The model is in runs/tidy-start" in outputs["teach"][1]
    lines = (tmp_path / "tidy" / "runs" / "tidy" / "evaluations.jsonl").read_text().splitlines()
    before, after = (json.loads(line)["success_rate"] for line in lines)
    assert before < after if kind == "--coding" else before <= 0.6 and after >= 0.9, (before, after)
    assert list((tmp_path / "tidy" / "evaluations").glob("*/view.html"))
