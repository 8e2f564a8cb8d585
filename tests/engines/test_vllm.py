"""Real vLLM in the trainer's process, each run in a process of its own: `make test-vllm`."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from g2po_recipes.smollm2 import smollm2_in_cache

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


def check_engine_and_trainer_agree(result, of_a_completion=1e-4):
    """Within 1e-4 nats a token, and `of_a_completion` in the product of a completion's ratios."""
    assert len(result["logs"]) == 3
    for entry in result["logs"]:
        assert entry["sampling/sampling_logp_difference/max"] <= 1e-4, "a stale or partial weight sync shows here"
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=of_a_completion)
        assert entry["sampling/importance_sampling_ratio/clipped_fraction"] == 0
    assert len(result["weight_differences"]) == 3 and max(result["weight_differences"]) == 0
    kl = [entry["kl"] for entry in result["logs"]]
    assert kl[-1] > 1e-5, "the policy must have moved, or equal weights prove nothing"


def check_hit_fractions(results):
    """What each log says is what all ranks' completions said, those of its own rollout."""
    for number, ranks in enumerate(zip(*(result["cache"] for result in results), strict=True)):
        cached, prompt_tokens = (sum(counts) for counts in zip(*ranks))
        assert 0 < cached < prompt_tokens
        logged = [result["logs"][number]["rollout/prefix_cache_hit_fraction"] for result in results]
        assert logged == pytest.approx([cached / prompt_tokens] * len(results))


@pytest.mark.pretrained
@pytest.mark.skipif(smollm2_in_cache() is None, reason="SmolLM2 is not in the cache: `make test-pretrained`")
def test_a_pretrained_model(tmp_path):
    """SmolLM2 in float32: its log-probabilities are ours in every rollout, and the weights those of the trainer."""
    (result,) = run(tmp_path, "pretrained")
    check_engine_and_trainer_agree(result, of_a_completion=1e-3)  # 32 tokens, 30 layers


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


def test_images_are_read_as_the_trainer_reads_them(tmp_path):
    """Qwen2.5-VL, with all weights trained: also once the weights have changed that make an image's features."""
    pytest.importorskip("torchvision", reason="the processor of Qwen2.5-VL needs it")
    (result,) = run(tmp_path, "images")
    assert max(result["off"]) <= 1e-4 and max(result["shown"]) == 2
    assert len(result["weight_differences"]) == 4 and max(result["weight_differences"]) == 0
    assert result["logs"][-1]["kl"] > 1e-5, "the policy must have moved, or equal weights prove nothing"


def test_requests_are_answered_as_they_ask(tmp_path):
    """Seeds, filters, stop sequences, structured outputs."""
    (result,) = run(tmp_path, "requests")
    first, again, _, place = result["seeded"]
    assert first == again, "one prompt, one seed"
    assert result["seeded elsewhere"][::2] == [place, first], "whatever else is asked for at the time"
    assert result["seeded elsewhere"][1] != place, "another seed"
    assert max(result["differences"]) <= 1e-4, "after temperature and filters"
    assert all(text.startswith("<think></think><action") and len(text) < 24 for text in result["stopped"])
    shaped = [f"<think></think><action>{action}</action>" for action in ("look", "go to desk 1")]
    assert len(result["shaped"]) == 4 and all(text in shaped for text in result["shaped"])
    assert result["likeliest"]


def test_a_panel_is_one_sync_and_its_completions_follow_from_eval_seed_alone(tmp_path):
    """Of an adapter, before and after training, in a run that goes on, on two ranks, and on two with one model."""
    (one,) = run(tmp_path, "evaluate adapter")
    panels = [one[name] for name in ("before", "again", "other_batches", "other_seed", "after")]
    for panel in panels:
        assert panel["syncs"] == 1 and panel["first"] == "sync" and panel["worst"] == 0
    assert one["training"] == {"syncs": 3, "worst": 0}
    assert one["before"]["completions"] == one["again"]["completions"] == one["other_batches"]["completions"]
    assert one["before"]["completions"] != one["other_seed"]["completions"]
    assert one["before"]["completions"] != one["after"]["completions"], "the policy must have moved"
    pairs = pairwise(one["before"]["completions"])
    assert any(a[1] != b[1] for a, b in pairs if a[0] == b[0]), "the two episodes of a task have seeds of their own"

    (resumed,) = run(tmp_path, "evaluate resumed")
    assert resumed["resumed"] == {"syncs": 1, "worst": 0}
    assert resumed["logs"][0]["sampling/sampling_logp_difference/max"] <= 1e-4

    seeds = []
    for name in ("evaluate", "evaluate in parallel"):
        folder = tmp_path / name
        folder.mkdir()
        two = run(folder, name, processes=2)
        seeds.append([result["initial_seed"] for result in two])
        for result in two:
            assert result["before"]["syncs"] == 1
            for panel in (result["before"], result["other_batches"]):
                assert panel["completions"] == one["before"]["completions"]
    assert seeds == [[42, 43], [42, 42]], "the trainer's own seed, not vLLM's"


def test_two_ranks_with_unequal_live_episodes(tmp_path):
    results = run(tmp_path, "full", processes=2)
    for result in results:
        check_engine_and_trainer_agree(result)
    first, second = (result["live_counts"] for result in results)
    assert first != second, "the ranks' episodes should not have ended together"
    check_hit_fractions(results)
    assert any(ending.endswith("<|im_end|>") for result in results for ending in result["endings"])


def test_equal_beginnings_are_computed_once_and_forgotten_with_the_weights(tmp_path):
    (result,) = run(tmp_path, "cache")
    block = result["block"]

    def hit(tokens):
        """vLLM keeps whole blocks, and always computes a prompt's last token."""
        return (tokens - 1) // block * block

    assert len(result["logs"]) == 3
    for entry in result["logs"]:  # the same prompt in all rollouts: of the first of its 8, nothing may be cached
        length = entry["rollout/mean_prompt_tokens"]
        assert length == int(length) and hit(length) >= 2 * block
        assert entry["rollout/prefix_cache_hit_fraction"] == pytest.approx(7 * hit(length) / (8 * length))
        assert entry["sampling/sampling_logp_difference/max"] <= 1e-4
    assert result["logs"][-1]["kl"] > 1e-4, "the weights must have changed in between"

    prompts, before, after, not_reset = (result[name] for name in ("prompts", "before", "after", "not_reset"))
    others = [len(os.path.commonprefix([prompts[0], prompt])) // block * block for prompt in prompts[8:]]
    again = [hit(len(prompts[0]))] * 7 + others
    for answers in (before, after):
        assert answers["cached"] == [0, *again] and min(others) >= 2 * block
        assert answers["completions"] == answers["transformers"]
    assert before["completions"] != after["completions"]
    assert not_reset["cached"][:8] == [hit(len(prompts[0]))] * 8
    assert not_reset["completions"] != not_reset["transformers"], "a stale cache would not have shown above"


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


def test_an_adapter_is_evaluated_by_vllm_as_by_transformers(tmp_path):
    """Greedily, so that both play the same."""
    pytest.importorskip("alfworld")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from g2po_envs.alfworld import generate_games
    from g2po_envs.alfworld.tiny import tiny_model_path

    generate_games(tmp_path / "games", "held-out", 6, seed=3, size="tiny", progress=False)
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_path()), LoraConfig(r=8))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(tiny_model_path()).save_pretrained(tmp_path / "adapter")
    actions = []
    for model, engine in (("adapter", "transformers"), ("adapter", "vllm"), (tiny_model_path(), "vllm")):
        options = '{"max_model_len": 600, "max_num_seqs": 8}' if engine == "vllm" else '{"dtype": "float32"}'
        output = tmp_path / str(len(actions))
        g2po(
            *("evaluate", "--model", tmp_path / model, "--engine", engine, "--engine-options", options),
            *("--environment", "alfworld", "--panel", tmp_path / "games", "--panel-options", '{"compact": true}'),
            *("--temperature", 0, "--max-completion-length", 24, "--num-environment-workers", 1, "--output", output),
        )
        played = map(json.loads, (output / "trajectories" / "direct-0.jsonl").read_text().splitlines())
        played = sorted(played, key=lambda t: t["info"]["panel_index"])
        actions.append([[step["action"] for step in t["steps"]] for t in played])
    assert actions[0] == actions[1] != actions[2]
