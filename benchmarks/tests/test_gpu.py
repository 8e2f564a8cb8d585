"""What a lent GPU is given to do, rehearsed on a CPU: a fault here would cost time on a GPU."""

import importlib.util
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from families import FAMILIES, gradient, in_layout, samples
from trl.trainer.utils import add_fused_lm_head

from benchmarks.gpu import jobs, learning, methods, phases, run, trie, work
from benchmarks.gpu.table import table
from benchmarks.learning import stages
from g2po_trl.rollout.player import Player

ROOT, SAY = run.ROOT, "import os, time; out = open(os.environ['GPU_FINDINGS'], 'a'); print('begun', flush=True); "


def arguments(tmp_path, *words):
    args = run.arguments([*map(str, ("--output", tmp_path, "--work", tmp_path, "--cache_dir", tmp_path, *words))])
    return args


def options(command):
    """The flags of a command by name; the last of a name counts."""
    return {a: b for a, b in zip(map(str, command), map(str, command[1:])) if a.startswith("--")}


# -- run.py


def test_parts_take_no_more_than_there_is(tmp_path, capsys):
    args = arguments(tmp_path)
    assert args.parts == list(run.DEFAULT) and args.seeds == [200]
    left, limits = 540.0, []
    for part in args.parts:
        limits.append(run.limit_of(part, left, args.parts))
        left -= limits[-1]
    assert min(limits) > 60 and left > 0 and run.limit_of("tests", -5.0, ["tests"]) == 0.0
    for words, said in ((["--start", tmp_path], "holds no model"), (["--parts", "smollm2"], "--winner is not given")):
        with pytest.raises(SystemExit):
            arguments(tmp_path, *words)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("part", run.PARTS)
def test_every_part_has_processes(tmp_path, part):
    """Their flags are the comparison's, but for those that a CPU needs."""
    (tmp_path / "config.json").touch()
    args = arguments(tmp_path, "--parts", part, "--start", tmp_path, "--winner", "LoRA", "--vllm")
    made = run.jobs_of(part, args, 100.0, {})
    assert len({job.name for job in made}) == len(made) and all(isinstance(w, str) for j in made for w in j.command)
    if part not in run.LEARNING:
        assert [job.name for job in made] == [part]
        return
    planned = {f"{part}-{job.name}": job for job in run.runs_of(part, args)}
    for job in made:
        found, wanted = options(job.command), options(planned[job.name].words if job.name in planned else ())
        changed = {name for name, value in wanted.items() if found.get(name) != value}
        assert changed <= {"--model_name_or_path", "--max_steps", *run.LEFT_OUT}
        assert found["--bf16"] == "true" and found["--use_vllm"] == "true"
        assert stages.TAUGHT not in job.command and not any(word.startswith(stages.GAME) for word in job.command)
    if part == run.METHODS:
        assert len(made) == 32
        own = {"--advantage_estimator", "--value_lambda", "--seed", "--output_dir", "--findings", "--until"}
        rest = [{name: value for name, value in options(job.command).items() if name not in own} for job in made]
        assert all(one == rest[0] for one in rest), "methods are compared on equal terms"


def test_runs_are_equal_until_they_differ():
    one = [{"weights": "a", "completions": "x"}, {"weights": "b", "completions": "y"}, {"weights": "c"}]
    other = [{"weights": "a", "completions": "x"}, {"weights": "q", "completions": "y"}, {"weights": "c"}]
    found = run.equal_until(one, other)
    assert (found["weights"], found["completions"], found["prompts"]) == (1, 2, 0)


@pytest.mark.slow
def test_shrunk(tmp_path):
    """Everything, on whatever is here: layouts are ordered, runs repeat, and methods of a seed begin alike."""
    import subprocess

    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.run",
        "--output",
        tmp_path,
        "--work",
        tmp_path / "work",
        "--shrink",
    ]
    command += [
        "--parts",
        "tests",
        "phases",
        "phases-conversations",
        "phases-hybrid",
        "teach",
        run.METHODS,
        run.REPEAT,
    ]
    command += ["--arms", "g2po", "grpo", "--seeds", "200"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "results.json").read_text())
    parts = found["parts"]
    assert {part["exit"] for part in parts.values()} == {0} and len(parts) == 5 + 2 + 4
    rows = {row["layout"]: row for row in parts["phases"]["findings"] if row.get("gradient_checkpointing")}
    assert rows["shared"]["positions"] < rows["padded"]["positions"] < rows["trl"]["positions"]
    rows = {row["layout"]: row for row in parts["phases-hybrid"]["findings"] if "layout" in row}
    assert rows["forked"]["positions"] < rows["padded"]["positions"] / 2
    assert set(found["equal until"]["invariant"].values()) == {2}, "on one CPU, with one thread, all is equal"
    first = [(tmp_path / "work" / name / "trajectories/train-000001.jsonl").read_text() for name in found["runs"]]
    ids = [
        [step["completion_ids"] for line in text.splitlines() for step in json.loads(line)["steps"]] for text in first
    ]
    assert ids[0] == ids[1]


# -- jobs.py


def jobs_of(tmp_path, seconds=20.0, **programs):
    return [jobs.Job(name, [sys.executable, "-Sc", code], tmp_path, seconds) for name, code in programs.items()]


def test_a_part_that_fails_leaves_what_it_has_found(tmp_path):
    """And the others run: one crashes, one hangs in the middle of a line with a child of its own, one is well."""
    hangs = "import subprocess; subprocess.Popen(['sleep', '60']); out.write('{\"a\": 1}\\n{\"b'); out.flush(); "
    made = jobs_of(
        tmp_path,
        3.0,
        crashes=SAY + "out.write('{\"a\": 2}\\n'); out.flush(); os.kill(os.getpid(), 9)",
        hangs=SAY + hangs + "time.sleep(60)",
        well=SAY + 'out.write(\'{"a": 3, "nan": NaN}\\n\')',
    )
    report = jobs.Report(tmp_path / "results.json", {"parts": {}})
    jobs.run(made, report, wait=0.02)
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [found[job.name]["findings"] for job in made] == [[{"a": 2}], [{"a": 1}], [{"a": 3, "nan": None}]]
    assert [found[job.name]["exit"] for job in made] == [-9, -9, 0]
    assert [found[job.name].get("timed_out") for job in made] == [None, True, None]
    assert found["crashes"]["last_lines"] == ["begun"] and sorted(path.name for path in tmp_path.glob(".*")) == []


def test_results_are_there_while_a_part_runs(tmp_path, monkeypatch):
    (job,) = jobs_of(tmp_path, part=SAY + "[(out.write('{}\\n'), out.flush(), time.sleep(0.2)) for _ in range(3)]")
    written = []
    report = jobs.Report(tmp_path / "results.json", {"parts": {}})
    monkeypatch.setattr(report, "write", lambda: written.append(len(job.result["findings"])))
    jobs.run([job], report, wait=0.02)
    assert sorted(set(written)) == [*range(written[0], 4)] and written[0] < 3


def test_the_exit_status_names_what_failed():
    parts = {
        "well": {"exit": 0, "findings": [{"outcome": "passed"}, {"error": "out of memory"}]},
        "out of time": {"exit": -9, "timed_out": True, "findings": [{"outcome": "passed"}]},
        "out of time after a failure": {"exit": -9, "timed_out": True, "findings": [{"outcome": "failed"}]},
        "crashed": {"exit": -9, "findings": []},
    }
    assert jobs.failed(parts) == ["out of time after a failure", "crashed"]


# -- table.py, methods.py


def test_table():
    row = {"attention": "sdpa", "gradient_checkpointing": True}
    speed = {"tokens_per_second": 12345, "tflop_per_second": 98.9}
    curve = [{"step": 0, "panel": 0.25}, *({"step": i, "success_rate": i / 8, "rollout": 2.0} for i in range(1, 5))]
    tested = {"test": "memory", "outcome": "passed", "seconds": 9.0, "measured_gb": 5.25}
    of_phases = [
        {"about": "batch", "tokens": 10, "unique_tokens": 4},
        {**row, "layout": "shared", "logps": speed, "update": speed, "peak_gb": 40.0, "first_seconds": 2.0},
        {**row, "layout": "padded", "error": "OutOfMemoryError"},
    ]
    content = {
        "machine": {"gpus": [{"name": "NVIDIA H100", "gb": 80.0}], "versions": {"torch": "2.9"}},
        "minutes": 9.0,
        "parts": {
            "tests": {"seconds": 50.0, "limit": 160.0, "exit": 1, "findings": [tested]},
            "phases": {"findings": of_phases, "timed_out": True},
            "g2po-seed0": {"findings": [*curve, {"step": 4, "panel": None}], "exit": 0},
        },
        "equal until": {"usual": {"of": 6, "weights": 2}},
    }
    assert set(table(content).splitlines()) >= {
        "NVIDIA H100 (80.0 GB), torch 2.9; 9.0 minutes",
        "| tests | 50.0 | 160.0 | exit code 1 |",
        "| phases |  |  | out of time |",
        "| memory | passed | 9.0 | measured_gb 5.25 |",
        "| sdpa | shared | yes | 12,345 | 12,345 | 4,938 | 98.9 | 10.0 | 40.0 | 2.0 |",
        "| sdpa | padded | yes | OutOfMemoryError |  |  |  |  |  |  |",
        "| g2po-seed0 | 4 | 25.0 | n/a | 25.0 | 37.5 | 2.0 |",
        "| usual | weights | 2 of 6 |",
    }


def test_methods_are_compared_over_the_iterations_that_all_have(capsys, monkeypatch):
    rates = {("g2po", 1): [0.5, 0.7, 0.0], ("grpo", 1): [0.2, 0.4], ("g2po", 2): [0.6, 0.7], ("grpo", 2): [0.4, 0.3]}
    made = {"runs": {}, "parts": {}}
    for (arm, seed), success in rates.items():
        lines = [{"step": step, "success_rate": rate} for step, rate in enumerate(success, 1)]
        lines += [{"step": step, "temperature": t, "panel": t * step / 10} for step in (1, 3) for t in (1.0, 0.4)]
        made["runs"][f"{arm}-{seed}"] = {"arm": arm, "seed": seed}
        made["parts"][f"{arm}-{seed}"] = {"findings": lines}
    found = methods.numbers(made)
    assert methods.iterations(made) == 2 and found["training"]["grpo", 2] == pytest.approx(35)
    assert found["held-out at 1.0"]["g2po", 1] == pytest.approx(30), "the last panel"
    assert methods.comparison(made, "training").differences["grpo"].mean == pytest.approx(-30)
    monkeypatch.setattr(sys, "argv", ["methods.py"])
    methods.main()
    assert "grpo          " in capsys.readouterr().out and methods.draw().axes


# -- learning.py, digests.py


def test_a_run_ends_in_time_or_where_it_was_to_come(tmp_path):
    def ends(success, steps=2, panel=False, **given):
        curve = learning.Curve(tmp_path / "found.jsonl", **{"until": time.time() + 1e6, **given})
        args, state = SimpleNamespace(eval_temperature=1.0), SimpleNamespace(global_step=0)
        control, found = SimpleNamespace(should_training_stop=False), []
        if panel:
            curve.on_log(args, state, control, {"eval_t0_4_success_rate": 0.3, "eval_t0_4_runtime": 3.0})
        for rate in success:
            for number in range(steps):
                curve.on_step_begin(args, state, control)
                state.global_step += 1
                if number == 0:
                    curve.on_log(args, state, control, {"episode/success_rate": rate})
                curve.on_step_end(args, state, control)
            found.append(control.should_training_stop)
        return found

    assert ends([0.9, 0.7, 0.8, 0.2], reach=0.8, every=4) == [False, False, False, True]
    assert ends([0.5], until=time.time() + 1e4, panels_take=1e4) == [True], (
        "no panel was played, and one takes so long"
    )
    (tmp_path / "found.jsonl").unlink()
    assert ends([0.5], until=time.time() + 1.0, panel=True) == [True]
    lines = jobs.read_lines(tmp_path / "found.jsonl")
    assert methods.panel(lines, 0.4) == {0: 0.3} and methods.success(lines) == [0.5]


def test_learning(tmp_path, games, run_main, monkeypatch):
    """The smallest run, by the command of a GPU: its curve, and a digest of each iteration."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--parts", run.REPEAT, "--shrink", "--start", run.TINY, "--cache_dir", games, "--", "--num_eval_games", 6]
    args = arguments(tmp_path, *words)
    job = run.jobs_of(run.REPEAT, args, 100.0, {})[0]
    AcceleratorState._reset_state(reset_partial_state=True)
    run_main(learning, *job.command[3:])
    curve, digests = (jobs.read_lines(tmp_path / name) for name in (f".{job.name}.jsonl", f"{job.name}.digests"))
    assert len(methods.success(curve)) == len(digests) == 2 and len(methods.panel(curve, 0.4)) == 1
    assert set(run.KINDS) - {"sampled log-probabilities"} <= set(digests[0])


# -- work.py, phases.py, trie.py


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-lora", "qwen2.5-1.5b", "qwen2.5-7b-lora", "qwen2.5-7b"])
def test_the_memory_that_a_recipe_counts_adds_up(name):
    counted = work.memory_of_recipe(ROOT / f"recipes/alfworld/{name}.yaml")
    parts = {part: number for part, number in counted.items() if part != "sum"}
    assert {"trainer", "vLLM", "update"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(counted["sum"], abs=0.6), "a sum is rounded to a GB"


def test_recorded_episodes_are_trained_on_and_none_is_played(tmp_path, monkeypatch):
    """With attention scores so low that exp(-logsumexp) is no float32."""
    monkeypatch.setattr(Player, "play", lambda *args, **kwargs: pytest.fail("an episode was played"))
    recorded = work.massive_trainer(tmp_path, use_cpu=True, per_device_train_batch_size=8)
    recorded.train()
    recorded.close()
    log = next(log for log in recorded.state.log_history if "episode/turns" in log)
    assert log["episode/turns"] == recorded.turns and recorded.state.global_step == 2
    model = work.massive_model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    with work.logsumexps() as found:
        log_probs = in_layout(model, *samples(), "shared")
    assert gradient(model, log_probs).isfinite().all() and max(found) < -88.7


def test_a_trie_has_the_log_probabilities_of_rows():
    conversations = work.synthetic_conversations(2, turns=3, vocabulary=60, lengths=(20, 4, 0, 6))
    model = FAMILIES["Qwen2"].build()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    rows, wanted = trie.micro_batches(conversations, 400), []
    assert len(rows) > 1 and sum(row["conversation_tokens"] for row in rows) > sum(len(r["input_ids"]) for r in rows)
    for one in conversations:
        ids, written = work.conversation_tokens(one)
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        wanted.append(scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(written[1:]) == 1])
    model.set_attn_implementation(trie.register())
    found = torch.cat([trie.log_probs(model, row, torch.device("cpu")) for row in rows])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=0)


def test_phases(tmp_path, run_main):
    wanted = ["sdpa:shared:plain", "sdpa:trl"]
    flags = [
        "--findings",
        tmp_path / "found.jsonl",
        "--seconds",
        1,
        "--turns",
        2,
        "--shrink",
        "--combinations",
        *wanted,
    ]
    run_main(phases, *flags)
    rows = [row for row in jobs.read_lines(tmp_path / "found.jsonl") if "layout" in row]
    assert [row["gradient_checkpointing"] for row in rows] == [False, True]
    assert rows[0]["positions"] < rows[1]["positions"] and len({r["tokens"] for r in rows}) == 1
    assert all(sorted(phases.spread(n)) == [*range(n)] for n in range(1, 40)) and phases.spread(4) == [0, 2, 1, 3]


@pytest.fixture
def tests_of_a_gpu(monkeypatch):
    """The module of tests/gpu, on this machine's CPU."""
    spec = importlib.util.spec_from_file_location("test_gpu_itself", ROOT / "tests/gpu/test_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)  # bfloat16 of a trainer before
    return module


def test_layouts_pass_here_what_a_gpu_is_asked(tests_of_a_gpu):
    found = tests_of_a_gpu.qwen.__wrapped__()
    for layout in ("padded", "shared"):
        tests_of_a_gpu.test_layouts_are_exact(found, lambda *recorded: None, "sdpa", layout)
    tests_of_a_gpu.test_hybrids_are_as_close_as_padding({}.__setitem__)
