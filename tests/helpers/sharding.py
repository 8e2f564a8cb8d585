"""Real FSDP2 and DeepSpeed ZeRO on CPU with gloo, for tests. Accelerate takes them for GPU-only: with `use_cpu` it
quietly falls back to DDP. Torch and DeepSpeed can do it, so its state is told that the ranks have accelerators.
"""

import importlib.util
import os

import pytest
import torch

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-deepspeed` brings its own",
)
ZERO = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": "auto"}
ZERO |= {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def prepare(sharding: str, bf16: bool = False) -> dict:
    """Before the configuration is made. Returns options for it."""
    if sharding == "fsdp2":
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        }
    if sharding.startswith("zero"):
        import deepspeed

        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
        deepspeed.init_distributed("gloo")
        stage = {"stage": int(sharding[-1]), "stage3_gather_16bit_weights_on_model_save": True}
        return {"deepspeed": {**ZERO, "zero_optimization": stage, "bf16": {"enabled": bf16}}}
    return {}


def pretend(sharding: str) -> None:
    """Between the configuration, which starts gloo, and the trainer."""
    if sharding == "none":
        return
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if sharding == "fsdp2":
        from accelerate import DistributedType, PartialState

        PartialState().distributed_type = DistributedType.MULTI_GPU


def check(trainer, sharding: str) -> None:
    kind = type(trainer.model_wrapped).__name__
    if sharding == "fsdp2":
        from torch.distributed.tensor import DTensor

        assert kind.startswith("FSDP") and isinstance(next(trainer.model.parameters()), DTensor), kind
    if sharding.startswith("zero"):
        assert kind == "DeepSpeedEngine" and trainer.model_wrapped.zero_optimization_stage() == int(sharding[-1]), kind


def whole_weights(trainer, sharding: str) -> torch.Tensor:
    parameters = list(trainer.accelerator.unwrap_model(trainer.model).parameters())
    if sharding == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return torch.cat([p.detach().flatten().clone() for p in parameters])
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in parameters])
