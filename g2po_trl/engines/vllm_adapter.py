"""Serve an adapter separately from the base weights of a colocated vLLM, instead of merging it into them.

vLLM keeps weights in bfloat16, where a change below half of the last place of a weight is lost: merging loses most of
a young adapter (docs/gpus.md, "LoRA and QLoRA"). Separate from the base, nothing of it is lost.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from packaging.version import Version
from peft import PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.options import require
from ..utils.trl_compat import vllm_engine_options
from .adapter_weights import Gather, adapter_parameters, check_mergeable, merged_parameters

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for
_NOT_SERVED = "use_dora modules_to_save rank_pattern alpha_pattern target_parameters lora_bias use_qalora use_bdlora "
_NOT_SERVED += "alora_invocation_tokens layer_replication arrow_config kasa_config trainable_token_indices bias"
_SAME_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # values of init_lora_weights that leave it alone


class AdapterGeneration(VLLMGeneration):
    """TRL's wrapper, which starts a colocated vLLM with room for an adapter that it can serve.

    TRL has no option for it, so `LLM` is replaced in its module. `merge` is `VLLMEngine`'s `merge_adapter`.
    """

    def __init__(self, *args: Any, merge: bool | None, **kwargs: Any):
        self.merge = merge
        if is_peft_model(kwargs["model"]):
            check_mergeable(kwargs["model"])
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "colocate" or not is_peft_model(self.model) or not self._serves():
            super()._init_vllm()
            return
        rank = next(room for room in RANKS if room >= self.model.active_peft_config.r)
        with vllm_engine_options(enable_lora=True, max_lora_rank=rank, max_loras=1):
            super()._init_vllm()

    def _serves(self) -> bool:
        if self.merge:
            return False
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models import supports_lora

        config = EngineArgs(self.model.name_or_path, trust_remote_code=self.trust_remote_code).create_model_config()
        if self.merge is None and config.dtype == torch.float32:
            return False  # merging loses nothing
        architecture, _ = config.registry.resolve_model_cls(config.architectures, config)
        reason = why_merged(self.model, self.enable_sleep_mode)
        if reason is None and not supports_lora(architecture):
            reason = f"it serves no adapters of {architecture.__name__}"
        if reason is None and Version(vllm.__version__) < Version("0.28"):
            reason = "before version 0.28, its layers with room for an adapter take no new weights"
        _check_merged(reason, self.merge)
        return reason is None


def _check_merged(reason: str | None, merge: bool | None) -> None:
    """Refuse, if it is to be served, an adapter that must be merged for a reason; otherwise log it."""
    must = f"vLLM must have the adapter merged into its weights, which rounds it: {reason}"
    require(reason is None or merge is not False, "merge_adapter", merge, f"{must}; set it to null or true")
    if reason is not None:
        logger.warning(must)


def why_merged(model: PeftModel, sleeps: bool = False) -> str | None:
    """Return why vLLM, which may sleep between rollouts, cannot serve a model's adapter, or `None`."""
    if len(model.active_adapters) != 1:
        return "it serves one LoRA adapter"
    is_quantized = getattr(model, "quantization_method", None) is not None
    if reason := why_not_served(model.active_peft_config, has_base=not is_quantized):
        return reason
    if sleeps:
        return "vllm_enable_sleep_mode discards the adapter"
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            if not isinstance(module.get_base_layer(), torch.nn.Linear) or name.endswith("lm_head"):
                return f"it does not serve adapters of {name.removeprefix('base_model.model.')}"
    return None


def why_not_served(config: PeftConfig, has_base: bool = False) -> str | None:
    """Return why vLLM cannot serve an adapter separately from its base, by its configuration, or `None`.

    `has_base`: vLLM is given the trainer's base, instead of the one in files.
    """
    if config.peft_type != PeftType.LORA:
        return "it serves one LoRA adapter"
    unserved = [name for name in _NOT_SERVED.split() if (getattr(config, name, None) or "none") != "none"]
    if unserved:
        return f"it does not serve LoRA with {', '.join(unserved)}"
    if not has_base and config.init_lora_weights not in _SAME_BASE:
        return f"init_lora_weights={config.init_lora_weights!r} changes the base, which it has from elsewhere"
    if config.r > RANKS[-1]:
        return f"lora_r is {config.r}, and it serves ranks of at most {RANKS[-1]}"
    return None


class ServedAdapter:
    """The active adapter of a trained model, in a colocated vLLM that was started with `enable_lora`.

    Args:
        llm: vLLM.
        model: the trained model.
        gather: see `merged_parameters`.
        device: see `merged_parameters`.
        merge: see `AdapterGeneration`; a `G2POError` is raised if it is `False` and `merges`.

    Attributes:
        merges: the adapter has parts that this vLLM does not serve. Then `weights` are merged, and requests are plain.
    """

    def __init__(self, llm: LLM, model: PeftModel, gather: Gather, device: torch.device, merge: bool | None = None):
        self.llm, self.model, self.gather, self.device = llm, model, gather, device
        theirs = llm.llm_engine.model_executor.driver_worker.model_runner.model
        served = {name.rpartition(".")[2] for name, module in theirs.named_modules() if hasattr(module, "base_layer")}
        for whole, parts in getattr(theirs, "packed_modules_mapping", {}).items():
            served.update(parts if whole in served else ())
        adapted = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
        unserved = ", ".join(sorted({name.rpartition(".")[2] for name in adapted} - served))
        self.merges, self._has_base, self._number = bool(unserved), False, 0
        _check_merged(f"it serves no {unserved}" if unserved else None, merge)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights to load into vLLM's base before the next rollout, by the names that it loads."""
        if not self.merges:
            if self._has_base or getattr(self.model, "quantization_method", None) is not None:
                return
            # Once, for they are frozen: the trainer's may not be those of the checkpoint. Quantized ones are.
            self._has_base = True
        yield from merged_parameters(self.model, self.gather, self.device, merges=self.merges)

    def load(self) -> LoRARequest | None:
        """Load the current adapter in place of the previous one and return the request that selects it.

        Its number is new each time, so that no cached prefix matches.
        """
        if self.merges:
            return None
        from vllm.lora.request import LoRARequest

        values = adapter_parameters(self.model, self.gather, self.device)
        with tempfile.TemporaryDirectory(prefix="g2po-adapter-") as folder:
            on_host = {name: value.to("cpu", copy=True).contiguous() for name, value in values.items()}
            save_file(on_host, Path(folder, "adapter_model.safetensors"))
            self.model.active_peft_config.save_pretrained(folder)
            if self._number:
                self.llm.llm_engine.remove_lora(self._number)
            self._number += 1
            request = LoRARequest(f"policy-{self._number}", self._number, folder)
            if not self.llm.llm_engine.add_lora(request):
                raise RuntimeError(f"vLLM has not loaded the adapter of rollout {self._number}: see its log")
        return request
