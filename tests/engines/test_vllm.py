"""Real vLLM in the trainer's process, each run in a process of its own: `make test-vllm`."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-vllm` brings its own"
    ),
]
SCRIPT = Path(__file__).parents[1] / "helpers" / "vllm_script.py"


def run(folder, mode, processes=1):
    """Return what each process of the script has written."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), SCRIPT, folder, mode],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


def check_engine_and_trainer_agree(result):
    assert len(result["logs"]) == 3
    for entry in result["logs"]:
        assert entry["sampling/sampling_logp_difference/max"] <= 1e-4, "a stale or partial weight sync shows here"
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert entry["sampling/importance_sampling_ratio/clipped_fraction"] == 0
    assert len(result["weight_differences"]) == 3 and max(result["weight_differences"]) == 0
    kl = [entry["kl"] for entry in result["logs"]]
    assert kl[-1] > 1e-5, "the policy must have moved, or equal weights prove nothing"


def test_lora_leaves_the_base_alone_and_completions_stop_at_the_tag(tmp_path):
    (result,) = run(tmp_path, "lora")
    check_engine_and_trainer_agree(result)
    assert result["base_change"] == 0, "TRL merges the adapter into the base for each sync"
    assert not result["serves_adapter"], "in float32 merging loses nothing"
    assert "</action>" in [ending[-9:] for ending in result["endings"]]
    assert not [ending for ending in result["endings"] if ending.endswith("</action><|im_end|>")], "it went on"


def test_an_adapter_beside_the_base_is_the_trainers_in_every_rollout(tmp_path):
    (result,) = run(tmp_path, "adapter")
    check_engine_and_trainer_agree(result)
    assert result["serves_adapter"] and result["base_change"] == 0


def test_the_completions_of_a_panel_follow_from_eval_seed_alone(tmp_path):
    """On one rank, on two, and on two with one model."""
    (one,) = run(tmp_path, "evaluate")
    first, other_batches, other_seed = one["panels"]
    assert first == other_batches != other_seed
    assert any(a[1] != b[1] for a, b in pairwise(first) if a[0] == b[0]), "the two episodes of a task have own seeds"
    seeds = []
    for name in ("evaluate", "evaluate in parallel"):
        folder = tmp_path / name
        folder.mkdir()
        two = run(folder, name, processes=2)
        seeds.append([result["initial_seed"] for result in two])
        assert [result["panels"][:2] for result in two] == [[first] * 2] * 2
    assert seeds == [[42, 43], [42, 42]], "the trainer's own seed, not vLLM's"


def test_two_ranks_with_unequal_live_episodes(tmp_path):
    results = run(tmp_path, "full", processes=2)
    for result in results:
        check_engine_and_trainer_agree(result)
    first, second = (result["live_counts"] for result in results)
    assert first != second, "the ranks' episodes should not have ended together"
    assert any(ending.endswith("<|im_end|>") for result in results for ending in result["endings"])


def g2po(*arguments, folder=None, processes=True):
    """The command, in a process of its own; vLLM's CPU build on little memory, by default in processes of its own."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1"}
    if not processes:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run(
        [sys.executable, "-m", "g2po_trl", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_run_is_evaluated_as_its_trainer_did(tmp_path):
    """A panel greedily by the trainer's own vLLM, then by the command: prompts and completions are equal."""
    pytest.importorskip("alfworld")
    from transformers import AutoTokenizer

    from g2po_trl import read_jsonl

    g2po(
        *("train", "alfworld", "--use_vllm", "true", "--vllm_mode", "colocate"),
        *("--num_games", "4", "--num_eval_games", "6", "--max_steps", "1", "--learning_rate", "2e-3"),
        *("--per_device_train_batch_size", "16", "--eval_temperature", "0", "--num_environment_workers", "1"),
        *("--cache_dir", "games"),
        folder=tmp_path,
    )
    run = tmp_path / "runs" / "alfworld-tiny"
    before, after = sorted(run.glob("trajectories/eval-*.jsonl"))
    panel = list(read_jsonl(after))
    assert [t.steps for t in read_jsonl(before)] != [t.steps for t in panel], "the weights must have moved"
    tokenizer = AutoTokenizer.from_pretrained(run)
    for engine in ("vllm", "transformers"):
        options = '{"max_model_len": 600, "max_num_seqs": 8}' if engine == "vllm" else "{}"
        arguments = "evaluate", "--model", run, "--engine", engine, "--engine-options", options, "--output", engine
        g2po(*arguments, folder=tmp_path, processes=False)
        played = read_jsonl(tmp_path / engine / "trajectories" / "direct-0.jsonl")
        played = sorted(played, key=lambda t: t.info["panel_index"])
        assert [t.task_id for t in played] == [t.task_id for t in panel]
        for theirs, ours in zip(panel, played):
            assert (theirs.outcome, theirs.reward) == (ours.outcome, ours.reward)
            for one, other in zip(theirs.steps, ours.steps, strict=True):
                for name in ("observation", "action", "completion"):
                    assert getattr(one, name) == getattr(other, name)
                assert tokenizer.decode(one.prompt_ids) == other.prompt
