"""What the trainer relies on inside TRL. When an upgrade breaks it, the failing test names what changed."""

import inspect
import re

import pytest
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import RepeatSampler, add_fused_lm_head, use_adapter

from g2po_trl.engines.trl_vllm import REQUESTS_AT_A_TIME
from g2po_trl.update.importance import MODES

# What TRL's loss reads from a micro-batch, and who puts it there.
WRITTEN_BY_US = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
}
NOT_USED = {
    "tool_mask",  # replies hold no tool output
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
}


def test_keys_the_loss_reads():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = set(re.findall(r"""inputs(?:\.get\(|\[)"(\w+)\"""", source)) | set(
        re.findall(r'"(\w+)" (?:not )?in inputs', source)
    )
    assert read - WRITTEN_BY_US - NOT_USED == set(), "the loss reads keys that g2po_trl.update.batch does not write"
    assert WRITTEN_BY_US - read == set(), "g2po_trl.update.batch writes keys that the loss no longer reads"


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_compute_loss", ["self", "model", "inputs"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_generate_and_score_completions", ["self", "inputs"]),  # docs/elsewhere.md
        ("_get_train_sampler", ["self", "dataset"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_get_output_dir", ["self", "trial"]),
        ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("init_hf_repo", ["self", "token", "private"]),
        ("save_model", ["self", "output_dir", "_internal_call"]),
        ("create_model_card", ["self", "model_name", "dataset_name", "tags"]),
    ],
)
def test_methods_we_override_or_call(method, parameters):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == parameters


def test_a_checkpoint_is_written_where_get_output_dir_says():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert (
        "run_dir = self._get_output_dir(" in source and 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source
    )
    assert "self.state.best_model_checkpoint = best_checkpoint_dir" in source
    assert "self._push_from_checkpoint(output_dir)" in source


def test_the_order_of_tasks_is_a_repeat_sampler():
    assert "return RepeatSampler(" in inspect.getsource(GRPOTrainer._get_train_sampler)
    parameters = ["data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"]
    assert list(inspect.signature(RepeatSampler).parameters) == parameters
    sampler = RepeatSampler(range(4), 2, 2, 3, seed=5)
    assert [getattr(sampler, name) for name in parameters[1:]] == [2, 2, 3, True, 5]
    assert "indexes = torch.randperm(self.num_samples, generator=self.generator)" in inspect.getsource(RepeatSampler)


def test_what_we_set_in_trls_vllm_wrapper():
    """`VLLMEngine` sets these for a call, keeps vLLM awake by `enable_sleep_mode`, brings as many prompts a rank."""
    source = inspect.getsource(VLLMGeneration)
    generate = inspect.getsource(VLLMGeneration.generate)
    numbers = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
    for name in (*numbers, "generation_kwargs"):
        assert re.search(rf"self\.{name}\b", generate), name
    assert generate.count("if self.enable_sleep_mode:") == 2 and "self.llm.sleep(level=2)" in generate
    assert "self._llm_weights_sleeping = True" in generate and 'self.llm.wake_up(tags=["weights"])' in source
    assert "(accelerator.process_index + 1) * len(prompts)" in generate
    parameters = ["self", "prompts", "images", "num_generations", "profiler"]
    assert list(inspect.signature(VLLMGeneration.generate).parameters) == parameters
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "self._dist = DistributedBackend(accelerator)" in source
    assert inspect.getsource(VLLMGeneration.sync_weights).count("self._iter_named_params()") == 4, "we replace it"


def test_where_requests_get_their_seeds():
    """All prompts of a call share their sampling parameters; `VLLMEngine` replaces them in each mode's one call."""
    generate = inspect.getsource(VLLMGeneration.generate)
    assert "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)" in generate
    assert (
        generate.count("self.vllm_client.generate(") == 1 and '"generation_kwargs": self.generation_kwargs' in generate
    )
    client = inspect.signature(VLLMClient.generate).parameters
    assert {"prompts", "features", "generation_kwargs"} <= set(client)
    assert "sampling_params.update(generation_kwargs or {})" in inspect.getsource(VLLMClient.generate)
    concurrency = inspect.signature(VLLMClient._generate_from_features).parameters["max_concurrent_requests"].default
    assert concurrency == REQUESTS_AT_A_TIME, "its session keeps as many connections"


def test_the_prefix_cache_of_trls_vllm_wrapper():
    """On by vLLM's default, reset with the weights; `VLLMEngine` listens to one call, its rank's answers in order."""
    assert "prefix_caching" not in inspect.getsource(VLLMGeneration._init_vllm), "TRL now says if it is on"
    assert "self.llm.reset_prefix_cache()" in inspect.getsource(VLLMGeneration.sync_weights)
    generate = inspect.getsource(VLLMGeneration.generate)
    assert generate.count("self.llm.generate(") == 1 and "all_outputs = self.llm.generate(vllm_prompts," in generate
    assert "local_rank_in_group = torch.distributed.get_rank(group=self.tp_group)" in generate
    groups = inspect.getsource(VLLMGeneration._init_vllm)
    assert "list(range(i * self.tensor_parallel_size, (i + 1) * self.tensor_parallel_size))" in groups


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            unwrap_model_for_generation,
            ["gather_deepspeed3_params", "generation_kwargs", "gradient_checkpointing_kwargs"],
        ),
        (disable_gradient_checkpointing, ["model", "gradient_checkpointing_kwargs"]),
        (use_adapter, ["model", "adapter_name"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_helpers_we_call(function, parameters):
    assert set(parameters) <= set(inspect.signature(function).parameters)


def test_the_modes_of_the_importance_ratio():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert set(re.findall(r'"((?:token|sequence)_\w+)"', source)) >= set(MODES)
    assert "vllm_importance_sampling_ratio" in source


def test_log_probabilities_come_first():
    signature = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    assert list(signature.parameters)[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert "logps, entropies" in inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)


def test_the_fused_lm_head_scores_what_the_body_hands_on():
    """`packing` lets the body hand on chosen hidden states only, and passes their labels already shifted."""
    source = inspect.getsource(add_fused_lm_head)
    for used in ('backbone_attr = "base_model"', "backbone_outputs.last_hidden_state", "labels = shift_labels"):
        assert used in source
    assert "model(**model_inputs, labels=labels, fused_lm_head=True)" in inspect.getsource(
        GRPOTrainer._get_per_token_logps_and_entropies
    )
    assert inspect.getsource(GRPOTrainer._compute_loss).count("self._get_per_token_logps_and_entropies(") == 1


def test_attributes_the_trainer_uses():
    source = inspect.getsource(GRPOTrainer)
    ours = (
        "_metrics",
        "eos_token_ids",
        "beta",
        "ref_model",
        "num_iterations",
        "aux_loss_enabled",
        "use_vllm",
    )
    corrections = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_min", "clip_max")]
    for attribute in (*ours, *corrections):
        assert f"self.{attribute} " in source or f"self.{attribute}:" in source, attribute


def test_logged_metrics_stay_in_one_dictionary():
    """`Iteration` writes into it."""
    source = inspect.getsource(GRPOTrainer)
    assert source.count("self._metrics =") == 1 and "self._metrics[mode].clear()" in source
    assert "self._metrics[mode] =" not in source


def test_loss_types_are_all_known():
    from g2po_trl.update.batch import MICRO_BATCH_TOKEN_MEAN_LOSSES, ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES

    source = inspect.getsource(GRPOTrainer._compute_loss).split("Entropy bonus")[0]
    named = set(re.findall(r'"(\w+)"', "".join(re.findall(r"self\.loss_type (?:==|in) (.*):", source))))
    assert named == {*ROW_MEAN_LOSSES, *MICRO_BATCH_TOKEN_MEAN_LOSSES, *TOKEN_MEAN_LOSSES}


def test_refused_options_still_exist():
    from g2po_trl.config_validation import REFUSED

    for name in REFUSED:
        assert name in GRPOConfig.__dataclass_fields__ or hasattr(GRPOConfig, name), name
