"""`benchmarks.gpu.run`: how it divides its time, what is left of a part that fails, its table; the recipes' sums."""

import json
import sys
import time

import pytest
import yaml

from benchmarks.gpu import run as gpu
from benchmarks.gpu import table as gpu_table

ROOT = gpu.ROOT


def test_parts_take_no_more_than_there_is():
    limits = gpu.plan(9)
    assert list(limits) == list(gpu.PARTS) and sum(limits.values()) <= 9 * 60
    assert min(limits.values()) > 60, "each part has time for something"
    assert gpu.plan(9, ["tests"])["tests"] > 500, "the last of the chosen parts has all that is left"
    assert gpu.plan(9, ["learning"])["learning"] > 500 and gpu.limit_of("tests", -5.0) == 0.0


def test_folders_are_where_the_user_stands(tmp_path, monkeypatch):
    """The parts run in the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("models", "wheels"):
        (tmp_path / name).mkdir()
    (tmp_path / "models/config.json").touch()
    args = gpu.arguments(
        "--output out --work work --cache_dir ~/cache --model models --start models --wheels wheels".split()
    )
    found = [args.output, args.work, args.cache_dir, args.model, args.start, args.wheels]
    assert found == [tmp_path / name for name in ("out", "work", "home/cache", "models", "models", "wheels")]


def flags_of(tmp_path, *words):
    """Of the lessons' command, by name."""
    args = gpu.arguments(["--output", str(tmp_path), *words])
    command = gpu.Learning(args, tmp_path).teach()[2:]
    assert all(name.startswith("--") for name in command[::2]) and len(set(command[::2])) == len(command) / 2
    return dict(zip(command[::2], command[1::2], strict=True))


@pytest.mark.parametrize("words", [[], ["--shrink"]])
def test_lessons_end_with_the_only_exam(tmp_path, words):
    recipe = yaml.safe_load((ROOT / "recipes/teach/alfworld.yaml").read_text())
    steps = recipe["num_demonstrations"] * recipe["num_train_epochs"] / recipe["per_device_train_batch_size"]
    assert int(flags_of(tmp_path, *words)["--exam_steps"]) >= steps


def test_the_model_that_is_named_is_taught(tmp_path):
    named = ["--model", str(tmp_path)]
    models = [
        flags_of(tmp_path, *words).get("--model_name_or_path")
        for words in ([], ["--shrink"], named, ["--shrink", *named])
    ]
    assert models == [None, gpu.TINY, str(tmp_path), str(tmp_path)]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run the last parts, lessons and runs being these programs; what was played, and the starts that runs got."""
    starts = []

    def played(teach, learn="", words=(), prepare=""):
        def learning_run(self, method, seed, start, seconds):
            starts.append(start)
            return [sys.executable, "-Sc", learn]

        monkeypatch.setattr(gpu, "machine", lambda environment: {})
        monkeypatch.setattr(gpu.Learning, "prepare", lambda self: [sys.executable, "-Sc", prepare])
        monkeypatch.setattr(gpu.Learning, "teach", lambda self: [sys.executable, "-Sc", teach])
        monkeypatch.setattr(gpu.Learning, "run", learning_run)
        flags = ["--output", tmp_path / "out", "--work", tmp_path / "work", "--methods", "g2po"]
        args = gpu.arguments([*map(str, flags), "--parts", "teach", "learning", *map(str, words)])
        args.output.mkdir(exist_ok=True)
        return gpu.play(args, args.work, time.monotonic()).content

    played.starts = starts
    return played


def test_a_start_is_one_that_was_saved_whole(tmp_path, play):
    """Not what lessons that were killed have left, nor an earlier run's."""
    folder = tmp_path / "work/start"
    save = f"from pathlib import Path; folder = Path({str(folder)!r}); folder.mkdir(parents=True, exist_ok=True); "
    save += "(folder / 'config.json').touch(); "
    found = [play(save + end)["start"] for end in ("1 / 0", "(folder / 'teaching.json').touch()", "1 / 0")]
    assert play.starts == [None, folder, None] and [start == "taught" for start in found] == [False, True, False]


def test_a_preparation_that_hangs_costs_the_others_little(play):
    """A connection that never answers, e.g. to the Hub."""
    found = play("", words=["--minutes", "0.4"], prepare="import time; time.sleep(600)")["parts"]
    assert found["preparation"]["timed_out"] and found["preparation"]["seconds"] < 8
    assert found["teach"]["exit"] == found["g2po-seed0"]["exit"] == 0


def test_a_start_that_is_named_is_taken(tmp_path, play, capsys):
    with pytest.raises(SystemExit):
        play("1 / 0", words=["--start", tmp_path])
    assert f"--start is {str(tmp_path)!r}, which holds no model" in capsys.readouterr().err
    (tmp_path / "config.json").touch()
    assert "teach" not in play("1 / 0", words=["--start", tmp_path])["parts"] and play.starts == [tmp_path]


def test_the_exit_status_names_what_failed():
    parts = {
        "well": {"exit": 0, "findings": [{"outcome": "passed"}, {"outcome": "skipped"}, {"error": "out of memory"}]},
        "out of time": {"exit": -9, "timed_out": True, "findings": [{"outcome": "passed"}]},
        "out of time after a failure": {"exit": -9, "timed_out": True, "findings": [{"outcome": "failed"}]},
        "test failed": {"exit": 1, "findings": [{"outcome": "failed"}]},
        "crashed": {"exit": -9, "findings": []},
    }
    assert gpu.failed(parts) == ["out of time after a failure", "test failed", "crashed"]
    assert gpu.failed({}) == []


@pytest.mark.parametrize("exits", [0, 3])
def test_a_part_that_fails_is_told_after_the_table(tmp_path, monkeypatch, capsys, exits):
    job = gpu.Job("teach", [sys.executable, "-Sc", f"raise SystemExit({exits})"], tmp_path, 20.0)

    def play(args, work, begun):
        report = gpu.Report(tmp_path / "results.json", {"machine": {}, "minutes": 9, "shrink": False, "parts": {}})
        gpu.run([job], report, wait=0.02)
        return report

    monkeypatch.setattr(gpu, "play", play)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    if exits:
        with pytest.raises(SystemExit, match=f"failed: teach; see teach.log in {tmp_path}"):
            gpu.main()
    else:
        gpu.main()
    assert f"| exit code {exits} |" in (tmp_path / "table.md").read_text()


def jobs_of(tmp_path, seconds=20.0, **programs):
    return [gpu.Job(name, [sys.executable, "-Sc", code], tmp_path, seconds) for name, code in programs.items()]


SAY = "import os, time; out = open(os.environ['GPU_FINDINGS'], 'a'); print('begun', flush=True); "


def test_a_part_that_fails_leaves_what_it_has_found(tmp_path):
    """And the others run: one crashes, one hangs in the middle of a line with a child of its own, one is well."""
    hangs = (
        "import subprocess; subprocess.Popen(['sleep', '60']); out.write('{\"a\": 1}\\n{\"b'); out.flush(); "
        "time.sleep(60)"
    )
    jobs = jobs_of(
        tmp_path,
        3.0,
        crashes=SAY + "out.write('{\"a\": 2}\\n'); out.flush(); os.kill(os.getpid(), 9)",
        hangs=SAY + hangs,
        well=SAY + 'out.write(\'{"a": 3, "nan": NaN}\\n\')',
    )
    report = gpu.Report(tmp_path / "results.json", {"parts": {}})
    gpu.run(jobs, report, wait=0.02)
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [found[job.name]["findings"] for job in jobs] == [[{"a": 2}], [{"a": 1}], [{"a": 3, "nan": None}]]
    assert [found[job.name]["exit"] for job in jobs] == [-9, -9, 0]
    assert [found[job.name].get("timed_out") for job in jobs] == [None, True, None]
    assert found["crashes"]["last_lines"] == ["begun"] and "last_lines" not in found["well"]
    assert found["well"]["seconds"] < 3 and sorted(path.name for path in tmp_path.glob(".*")) == []


def test_results_are_there_while_a_part_runs(tmp_path, monkeypatch):
    (job,) = jobs_of(tmp_path, part=SAY + "[(out.write('{}\\n'), out.flush(), time.sleep(0.2)) for _ in range(3)]")
    written = []
    report = gpu.Report(tmp_path / "results.json", {"parts": {}})
    monkeypatch.setattr(report, "write", lambda: written.append(len(job.result["findings"])))
    gpu.run([job], report, wait=0.02)
    assert sorted(set(written)) == [*range(written[0], 4)] and written[0] < 3


def test_table():
    row = {"attention": "sdpa", "gradient_checkpointing": True}
    speed = {"tokens_per_second": 12345, "tflop_per_second": 98.9}
    measured = {"logps": speed, "update": speed, "peak_gb": 40.0, "first_seconds": 2.0}
    curve = [{"step": 0, "panel": 0.25}, *({"step": i, "success_rate": i / 8, "rollout": 2.0} for i in range(1, 5))]
    content = {
        "machine": {"gpus": [{"name": "NVIDIA H100", "gb": 80.0}], "versions": {"torch": "2.9"}},
        "minutes": 9.0,
        "shrink": False,
        "parts": {
            "tests": {
                "seconds": 50.0,
                "limit": 160.0,
                "exit": 1,
                "findings": [
                    {"test": "memory", "outcome": "passed", "seconds": 9.0, "measured_gb": 5.25},
                    {"test": "flex", "outcome": "failed", "seconds": 1.0, "reason": ["E  assert", "it is wrong"]},
                ],
            },
            "phases": {
                "findings": [
                    {"about": "batch", "tokens": 10, "unique_tokens": 4},
                    {**row, "layout": "shared", **measured},
                    {**row, "layout": "padded", "error": "OutOfMemoryError"},
                ],
                "timed_out": True,
            },
            "g2po-seed0": {"findings": [*curve, {"step": 4, "panel": 0.5}], "exit": 0},
        },
    }
    lines = gpu_table.table(content).splitlines()
    assert lines[0] == "NVIDIA H100 (80.0 GB), torch 2.9; 9.0 minutes"
    for line in (
        "| tests | 50.0 | 160.0 | exit code 1 |",
        "| phases |  |  | out of time |",
        "| memory | passed | 9.0 | measured_gb 5.25 |",
        "| flex | failed | 1.0 | it is wrong |",
        "| sdpa | shared | yes | 12,345 | 12,345 | 4,938 | 98.9 | 10.0 | 40.0 | 2.0 |",
        "| sdpa | padded | yes | OutOfMemoryError |  |  |  |  |  |  |",
        "| g2po-seed0 | 4 | 25.0 | 50.0 | 25.0 | 37.5 | 2.0 |",
    ):
        assert line in lines
    assert gpu_table.table({"machine": {"error": ["no torch"]}, "minutes": 1, "shrink": True, "parts": {}})


def test_a_rate_of_no_episode_is_not_a_number():
    """All of the panel's and of the first iterations' ended in errors."""
    found = [{"panel": None}, *({"success_rate": rate} for rate in (None, None, None, 0.5)), {"panel": 0.25}]
    content = {"machine": {}, "minutes": 1, "shrink": True, "parts": {"g2po-seed0": {"findings": found, "exit": 0}}}
    assert "| g2po-seed0 | 4 | n/a | 25.0 | n/a | 50.0 | 0.0 |" in gpu_table.table(content).splitlines()


@pytest.fixture(scope="module")
def gpu_work():
    from benchmarks.gpu import work as gpu_work

    return gpu_work


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-lora", "qwen2.5-1.5b", "qwen2.5-7b-lora", "qwen2.5-7b"])
def test_the_memory_that_a_recipe_counts_adds_up(gpu_work, name):
    counted = gpu_work.memory_of_recipe(ROOT / f"recipes/alfworld/{name}.yaml")
    parts = {part: number for part, number in counted.items() if part != "sum"}
    assert {"trainer", "vLLM", "update"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(counted["sum"], abs=0.6), "a sum is rounded to a GB"


def test_synthetic_episodes_are_as_long_as_the_papers_and_branch(gpu_work):
    episodes = gpu_work.synthetic_trajectories(groups=4, turns=4)
    steps = [step for episode in episodes for step in episode.steps]
    assert len(episodes) == 32 and len(steps) == 128
    assert sum(len(step.prompt_ids) for step in steps) / 128 == pytest.approx(700, rel=0.05)
    assert sum(len(step.completion_ids) for step in steps) / 128 == pytest.approx(150, rel=0.05)
    assert all(step.prompt_ids[:280] == steps[0].prompt_ids[:280] for step in steps)
    prompts = [{tuple(episode.steps[turn].prompt_ids) for episode in episodes} for turn in range(4)]
    assert len(prompts[0]) == 4 and len(prompts[0]) < len(prompts[3]) <= 16
    assert len({(step.key, tuple(step.prompt_ids)) for step in steps}) == sum(map(len, prompts)), (
        "key and prompt agree"
    )
    for group in range(4):
        assert len({episode.reward for episode in episodes[8 * group : 8 * group + 8]}) == 2


def test_massive_activations_are_as_large_as_they_must_be(gpu_work):
    """There exp(-logsumexp) is no float32; here, on a CPU, the gradient is finite."""
    from families import gradient, in_layout, samples
    from trl.trainer.utils import add_fused_lm_head

    model = gpu_work.massive_model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    with gpu_work.logsumexps() as found:
        log_probs = in_layout(model, *samples(), "shared")
    assert len(found) > 2 and max(found) < -88.7
    assert gradient(model, log_probs).isfinite().all()


@pytest.mark.slow
def test_massive_activations_are_trained_on(gpu_work, tmp_path):
    trainer = gpu_work.massive_trainer(tmp_path, use_cpu=True)
    with gpu_work.logsumexps() as found:
        trainer.train()
    trainer.close()
    assert trainer.state.global_step == 2 and min(found) < -88.7


def test_micro_batches_are_taken_from_all_over():
    from benchmarks.gpu import phases as gpu_phases

    assert gpu_phases.spread(8) == [0, 4, 2, 6, 1, 3, 5, 7] and gpu_phases.spread(1) == [0]
    assert all(sorted(gpu_phases.spread(n)) == [*range(n)] for n in range(1, 40))


@pytest.mark.slow
def test_shrunk(tmp_path, gpu_work):
    """Everything, on whatever is here."""
    import subprocess

    command = [sys.executable, "-m", "benchmarks.gpu.run", "--output", tmp_path, "--shrink", "--minutes", "9"]
    command += ["--batches", "windows", "conversations"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = json.loads((tmp_path / "results.json").read_text())
    parts = found["parts"]
    assert done.returncode == 0, done.stderr
    assert {name: part["exit"] for name, part in parts.items()} == dict.fromkeys(parts, 0), done.stdout
    assert set(parts) == {
        "preparation",
        "tests",
        "phases",
        "phases-conversations",
        "teach",
        "g2po-seed0",
        "grpo-seed0",
    }
    rows = {(row["attention"], row["layout"]): row for row in parts["phases"]["findings"] if "layout" in row}
    layouts = [rows["sdpa", layout] for layout in ("shared", "padded", "trl")]
    assert [row["positions"] for row in layouts] == sorted(row["positions"] for row in layouts)
    assert len({row["tokens"] for row in layouts}) == 1
    found_of = parts["phases-conversations"]["findings"]
    rows = {row["layout"]: row for row in found_of if row.get("attention") == "sdpa"}
    made = gpu_work.synthetic_conversations(2, 3, 2000, (40, 4, 40, 12))
    sequences = [[*step.prompt_ids, *step.completion_ids] for one in made for step in one.steps]
    unique = len({tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)})
    batch = next(row for row in found_of if row.get("about") == "batch")
    assert (batch["unique_tokens"], batch["tokens"]) == (unique, sum(map(len, sequences)))
    positions = [rows[layout]["positions"] for layout in ("shared", "rows", "trl")]
    assert [unique, *positions] == sorted([unique, *positions]), "none computes less than all"
    assert unique <= rows["trie"]["positions"] <= rows["rows"]["positions"]
    for method in ("g2po", "grpo"):
        lines = parts[f"{method}-seed0"]["findings"]
        assert ["panel" in line for line in lines] == [True, False, False, True] and found["start"] == "taught"
    assert found["machine"]["versions"]["torch"] and found["commit"] and "| sdpa | shared | yes |" in done.stdout
