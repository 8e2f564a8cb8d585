"""What the trainer relies on inside TRL. When an upgrade breaks it, the failing test names what changed."""

import importlib
import inspect
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head, create_model_from_path, get_config_model_id

from g2po_trl.config_validation import inherited
from g2po_trl.update.batch import MICRO_BATCH_TOKEN_MEAN_LOSSES, ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES
from g2po_trl.update.policy.importance import MODES
from g2po_trl.utils import trl_compat
from g2po_trl.utils.forward_pass import keep_outputs_exact

# What TRL's loss reads from a micro-batch, and who puts it there.
WRITTEN_BY_US = {
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"),
}
NOT_USED = {
    "tool_mask",  # completions hold no tool output
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
}


def test_keys_the_loss_reads():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = {*re.findall(r'inputs(?:\.get\(|\[)"(\w+)"', source), *re.findall(r'"(\w+)" (?:not )?in inputs', source)}
    assert read - WRITTEN_BY_US - NOT_USED == set(), "the loss reads keys that g2po_trl.update.batch does not write"
    assert WRITTEN_BY_US - read == set(), "g2po_trl.update.batch writes keys that the loss no longer reads"


METHODS = {  # after `self`; "…": later ones may follow, as `private`, which is passed where a user passes it
    "_compute_loss": "model inputs",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "training_step": "model inputs num_items_in_batch",
    "_prepare_inputs": "generation_batch",
    "_generate_and_score_completions": "inputs",  # docs/elsewhere.md
    "_get_train_sampler": "dataset",
    "_save_checkpoint": "model trial",
    "_get_output_dir": "trial",
    "_push_from_checkpoint": "checkpoint_folder",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "save_model": "output_dir _internal_call",
    "create_model_card": "model_name dataset_name tags",
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model grad_norm",
    "create_accelerator_and_postprocess": "",
    "log": "logs start_time",
    "init_hf_repo": "token …",
    "push_to_hub": "commit_message blocking token revision …",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep …",
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_we_override_or_call(method):
    _, *found = inspect.signature(getattr(GRPOTrainer, method)).parameters
    *wanted, last = METHODS[method].split() or [""]
    assert found[: len(wanted)] == wanted and (last == "…" or found[len(wanted) :] == [last] * bool(last))


SOURCES = {
    Trainer._save_checkpoint: """run_dir = self._get_output_dir(
        f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self.state.best_model_checkpoint = best_checkpoint_dir
        self._push_from_checkpoint(output_dir)""",
    GRPOTrainer._get_train_sampler: "return RepeatSampler(",
    RepeatSampler: """self.shuffle = shuffle
        self.seed = seed
        indexes = torch.randperm(self.num_samples, generator=self.generator)""",
    # `VLLMEngine` keeps vLLM awake, brings as many prompts a rank, and listens to its only call, in order of ranks.
    VLLMGeneration.generate: """self.llm.sleep(level=2)
        self._llm_weights_sleeping = True
        (accelerator.process_index + 1) * len(prompts)
        all_outputs = self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)
        "generation_kwargs": self.generation_kwargs
        local_rank_in_group = torch.distributed.get_rank(group=self.tp_group)""",
    VLLMClient.generate: "sampling_params.update(generation_kwargs or {})",
    VLLMGeneration.sync_weights: "self.llm.reset_prefix_cache()",
    VLLMGeneration._init_vllm: """list(range(i * self.tensor_parallel_size, (i + 1) * self.tensor_parallel_size))
        model=model.name_or_path,
        self.llm = LLM(""",
    VLLMGeneration: """self.llm.wake_up(tags=["weights"])
        self._dist = DistributedBackend(accelerator)""",
    GRPOTrainer.__init__: """self.vllm_generation = VLLMGeneration(
        self._dist = DistributedBackend(self.accelerator)""",
    GRPOTrainer._get_per_token_logps_and_entropies: """logps, entropies
        model(**model_inputs, labels=labels, fused_lm_head=True)""",
    # `fused_log_probs` lets the body hand on chosen hidden states only, and passes their labels already shifted.
    add_fused_lm_head: """backbone_attr = "base_model"
        backbone_outputs.last_hidden_state
        labels = shift_labels""",
    GRPOTrainer.log: "self._metrics[mode].clear()",  # `Iteration` writes into it
    PreTrainedModel: "is_gradient_checkpointing",  # `_DEPRECATED` is still needed
    AcceleratorState: "self.fsdp_plugin = fsdp_plugin",  # `keep_outputs_exact`
}


@pytest.mark.parametrize("owner", SOURCES, ids=lambda owner: owner.__qualname__)
def test_what_stands_in_the_source(owner):
    source = inspect.getsource(owner)
    assert [line for line in SOURCES[owner].splitlines() if line.strip() not in source] == []


def test_what_stands_there_so_many_times():
    generate = inspect.getsource(VLLMGeneration.generate)
    assert generate.count("if self.enable_sleep_mode:") == 2 and generate.count("self.llm.generate(") == 1
    assert inspect.getsource(VLLMGeneration.sync_weights).count("self._iter_named_params()") == 4, "we replace it"
    assert "prefix_caching" not in inspect.getsource(VLLMGeneration._init_vllm), "TRL now says if it is on"
    trainer = inspect.getsource(GRPOTrainer)
    assert trainer.count("self._metrics =") == 1 and "self._metrics[mode] =" not in trainer
    assert inspect.getsource(GRPOTrainer._compute_loss).count("self._get_per_token_logps_and_entropies(") == 1
    numbers = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
    for name in (*numbers, "generation_kwargs"):  # set for each call
        assert re.search(rf"self\.{name}\b", generate), name


HELPERS = {
    DistributedBackend.gather_params: "self params",
    unwrap_model_for_generation: "gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs",
    VLLMGeneration.generate: "self prompts images num_generations profiler",
    disable_gradient_checkpointing: "model gradient_checkpointing_kwargs",
    get_config_model_id: "config",
    create_model_from_path: "model_id kwargs",
}


@pytest.mark.parametrize("function", HELPERS, ids=lambda value: value.__name__)
def test_helpers_we_call(function):
    assert set(HELPERS[function].split()) <= set(inspect.signature(function).parameters)


def test_no_adapter_is_copied_without_beta():
    source = inspect.getsource(GRPOTrainer.__init__)
    assert re.findall(r".*args\.beta.*", source) == [
        "        elif is_peft_model(model) and args.beta != 0.0:",
        "        self.beta = args.beta",
    ]
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    args = SimpleNamespace(beta=0.1, model_init_kwargs={"dtype": "float32"})
    with trl_compat.reference_copied_from(model, args):
        assert args.beta == 0.0 and args.model_init_kwargs is not None
    with trl_compat.reference_copied_from(torch.nn.Linear(1, 1), args, loaded=True):
        assert args.beta == 0.1 and args.model_init_kwargs is None
    assert args.beta == 0.1 and args.model_init_kwargs == {"dtype": "float32"}


def test_the_modes_of_the_importance_ratio():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert set(re.findall(r'"((?:token|sequence)_\w+)"', source)) >= set(MODES)
    assert "vllm_importance_sampling_ratio" in source


def test_attributes_the_trainer_uses():
    source = inspect.getsource(GRPOTrainer)
    ours = ("_metrics", "eos_token_ids", "beta", "ref_model", "num_iterations", "aux_loss_enabled", "use_vllm")
    corrections = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_min", "clip_max")]
    for attribute in (*ours, *corrections):
        assert f"self.{attribute} " in source or f"self.{attribute}:" in source, attribute


def test_loss_types_are_all_known():
    source = inspect.getsource(GRPOTrainer._compute_loss).split("Entropy bonus")[0]
    named = set(re.findall(r'"(\w+)"', "".join(re.findall(r"self\.loss_type (?:==|in) (.*):", source))))
    assert named == {*ROW_MEAN_LOSSES, *MICRO_BATCH_TOKEN_MEAN_LOSSES, *TOKEN_MEAN_LOSSES}


# Inherited options whose effect was seen, or read in the code: as documented by TRL and transformers, or refused for
# certain values.
WORKING = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
auto_find_batch_size beta bf16 cache_implementation cast_lm_head_to_fp32 chat_template_kwargs dataloader_drop_last
dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed delta disable_tqdm do_eval
do_predict do_train ds3_gather_for_generation epsilon epsilon_high eval_delay eval_on_start eval_steps eval_strategy
fp16 fsdp fsdp_config full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token ignore_data_skip importance_sampling_level include_num_input_tokens_seen
learning_rate load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_first_step
logging_nan_inf_filter logging_steps logging_strategy loss_type lr_scheduler_kwargs lr_scheduler_type
mask_truncated_completions max_completion_length max_grad_norm max_steps metric_for_best_model min_p model_init_kwargs
num_generations num_generations_eval num_iterations num_train_epochs off_policy_mask_threshold optim optim_args
optim_target_modules output_dir pad_to_multiple_of parallelism_config per_device_eval_batch_size
per_device_train_batch_size project push_to_hub ref_model_mixup_alpha ref_model_sync_steps repetition_penalty report_to
restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights router_aux_loss_coef run_name
sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model save_steps save_strategy save_total_limit
scale_rewards seed shuffle_dataset skip_memory_metrics steps_per_generation sync_ref_model temperature tf32 top_k top_p
torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id trust_remote_code use_bias_correction_kl use_cache use_cpu use_vllm vespo_k_neg vespo_k_pos
vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size warmup_steps weight_decay
"""

# Of transformers 5.17, the oldest that is admitted, and those that it does not have yet.
OLDER = {"logging_dir", "warmup_ratio"}
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
NEWER |= {"dataloader_in_order", "dataloader_multiprocessing_context"}


def test_every_inherited_option_works_or_is_refused_or_warned_about():
    """An option that is new in TRL or transformers has to be decided on before its version is allowed."""
    decided = [*WORKING.split(), *inherited("refused"), *inherited("no_effect")]
    assert len(decided) == len(set(decided)), "decided twice"
    fields = set(GRPOConfig.__dataclass_fields__)
    assert set(decided) - (NEWER - fields) == fields - OLDER


# -- g2po_trl.utils.trl_compat ---------------------------------------------------------------------------------------


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=20, num_key_value_heads=1, **sizes)).eval()


def test_it_ignores_what_trl_causes_and_nothing_else():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(trl_compat)
        GRPOConfig("", bf16=False, use_cpu=True)
        model = tiny_model()
        model.is_gradient_checkpointing  # noqa: B018
        model.gradient_checkpointing_enable()
        with trl_compat.disable_gradient_checkpointing(model, None):
            warnings.warn("`use_cache` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["`use_cache` is deprecated"]
    assert "gradient_checkpointing" in GRPOConfig.__dataclass_fields__


def test_trl_calls_its_vllm_by_global_names(monkeypatch):
    original = grpo_trainer.VLLMGeneration
    with trl_compat.vllm_generation_class(len):
        assert grpo_trainer.VLLMGeneration is len
    assert grpo_trainer.VLLMGeneration is original
    monkeypatch.setattr(vllm_generation, "LLM", dict, raising=False)
    with trl_compat.vllm_engine_options(enable_lora=True):
        assert vllm_generation.LLM(model="m") == {"enable_lora": True, "model": "m"}
    assert vllm_generation.LLM is dict


def test_fsdp2_rounds_neither_log_probs_nor_sums_of_gradients():
    """Accelerate's own policy would; a user's keeps its other fields."""
    exact, half = torch.float32, torch.bfloat16
    for reduced, expected in ((half, exact), (exact, exact), (torch.float16, torch.float16)):
        plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(half, reduced, half))
        keep_outputs_exact(SimpleNamespace(is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin)))
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(half, expected, None)
