"""What the trainer relies on inside TRL. When an upgrade breaks it, the failing test names what changed."""

import inspect
import re

import pytest
from trl import GRPOConfig, GRPOTrainer

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
}
NOT_USED = {
    "tool_mask",  # replies hold no tool output
    "importance_sampling_ratio",  # generation is by the trained model itself
    "sampling_per_token_logps",
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
}


def test_keys_the_loss_reads():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = set(re.findall(r"""inputs(?:\.get\(|\[)"(\w+)\"""", source)) | set(
        re.findall(r'"(\w+)" (?:not )?in inputs', source)
    )
    assert read - WRITTEN_BY_US - NOT_USED == set(), "the loss reads keys that g2po_trl.batch does not write"
    assert WRITTEN_BY_US - read == set(), "g2po_trl.batch writes keys that the loss no longer reads"


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_compute_loss", ["self", "model", "inputs"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
    ],
)
def test_methods_we_override_or_call(method, parameters):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == parameters


def test_log_probabilities_come_first():
    signature = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    assert list(signature.parameters)[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert "logps, entropies" in inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)


def test_attributes_the_trainer_uses():
    source = inspect.getsource(GRPOTrainer)
    for attribute in ("_step", "_metrics", "eos_token_ids", "beta", "ref_model", "num_iterations", "aux_loss_enabled"):
        assert f"self.{attribute} " in source or f"self.{attribute}:" in source, attribute


def test_loss_types_are_all_known():
    from g2po_trl.batch import MICRO_BATCH_TOKEN_MEAN_LOSSES, ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES

    source = inspect.getsource(GRPOTrainer._compute_loss).split("Entropy bonus")[0]
    named = set(re.findall(r'"(\w+)"', "".join(re.findall(r"self\.loss_type (?:==|in) (.*):", source))))
    assert named == {*ROW_MEAN_LOSSES, *MICRO_BATCH_TOKEN_MEAN_LOSSES, *TOKEN_MEAN_LOSSES}


def test_refused_options_still_exist():
    from g2po_trl.config import _REFUSED

    for name in _REFUSED:
        assert name in GRPOConfig.__dataclass_fields__ or hasattr(GRPOConfig, name), name
