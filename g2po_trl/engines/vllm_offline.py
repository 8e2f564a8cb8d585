"""Completions by vLLM in this process, for a model that is not being trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..utils.adapters import find_adapter
from ..utils.options import require
from .stop_tokens import get_stop_token_ids_of_checkpoint
from .vllm_requests import RequestEngine, caches_prefixes


class OfflineVLLMEngine(RequestEngine):
    """Generates by vLLM in this process, for a checkpoint or an adapter that is not being trained.

    Args:
        model: a folder or a Hub id. For an adapter, its base model is loaded as well.
        options: further `SamplingParams` of vLLM, except those that `Sampling` has.
        **vllm_options: passed to `vllm.LLM`.

    Attributes:
        longest: maximum tokens of prompt and completion together.
        images_from: folders or Hub ids that may have the processor, in order; none if the model reads only text.
    """

    def __init__(self, model: str, options: dict[str, Any] | None = None, **vllm_options: Any):
        from vllm import LLM

        lora = None
        adapter = find_adapter(model) if Path(model).is_dir() else None
        if adapter is not None:
            from peft import PeftConfig
            from vllm.lora.request import LoRARequest

            from .vllm_adapter import why_not_served

            config = PeftConfig.from_pretrained(str(adapter))
            reason = why_not_served(config)
            remedy = "use transformers as engine, or merge the adapter (merge_and_unload) and pass the folder of that"
            require(reason is None, "model", model, f"vLLM does not serve this adapter: {reason}; {remedy}")
            lora = LoRARequest("adapter", 1, str(adapter))
            vllm_options = {"enable_lora": True, "max_lora_rank": max(8, config.r), **vllm_options}
            if Path(model, "tokenizer_config.json").is_file():  # with the chat template of its training
                vllm_options = {"tokenizer": model, **vllm_options}
            model = config.base_model_name_or_path
        # vLLM would take temperature, top_p, … that a request leaves open from the checkpoint's generation_config.
        self.llm = LLM(model, **{"generation_config": "vllm", **vllm_options})
        try:
            tokenizer = self.llm.get_tokenizer()
            stop_token_ids = get_stop_token_ids_of_checkpoint(tokenizer, model, vllm_options.get("revision"))
            super().__init__(tokenizer, stop_token_ids, options)
            self.core, self.lora, self.reports_cached_tokens = self.llm.llm_engine, lora, caches_prefixes(self.llm)
            config = self.core.model_config
            self.longest = config.max_model_len
            self.images_from = [config.tokenizer, config.model] if config.is_multimodal_model else []
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End vLLM's processes: Python waits for them at its exit, and may do so before vLLM ends them."""
        self.llm.llm_engine.engine_core.shutdown()
