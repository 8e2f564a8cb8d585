"""Completions by vLLM in this process, for a model that is not being trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .stop_tokens import get_stop_token_ids_of_checkpoint
from .vllm_requests import RequestEngine, Requests, caches_prefixes


class OfflineVLLMEngine(RequestEngine):
    """Generates by vLLM in this process, for a checkpoint or an adapter that is not being trained.

    Args:
        model: a folder or a Hub id. For an adapter, its base model is loaded as well.
        options: more of vLLM's `SamplingParams`: none that `Sampling` has.
        **vllm_options: passed to `vllm.LLM`.
    """

    def __init__(self, model: str, options: dict[str, Any] | None = None, **vllm_options: Any):
        from vllm import LLM

        lora = None
        adapter = Path(model, "adapter_config.json")
        if adapter.is_file():
            from vllm.lora.request import LoRARequest

            settings = json.loads(adapter.read_text())
            lora = LoRARequest("adapter", 1, model)
            vllm_options = {"enable_lora": True, "max_lora_rank": max(8, settings["r"]), **vllm_options}
            model = settings["base_model_name_or_path"]
        # vLLM would take temperature, top_p, … that a request leaves open from the checkpoint's generation_config.
        self.llm = LLM(model, **{"generation_config": "vllm", **vllm_options})
        try:
            tokenizer = self.llm.get_tokenizer()
            stop_token_ids = get_stop_token_ids_of_checkpoint(tokenizer, model, vllm_options.get("revision"))
            super().__init__(tokenizer, stop_token_ids, options)
            self.requests, self.reports_cached_tokens = Requests(self.llm, lora), caches_prefixes(self.llm)
            self.longest = self.llm.llm_engine.model_config.max_model_len
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End vLLM's processes: Python waits for them at its exit, and may do so before vLLM ends them."""
        self.llm.llm_engine.engine_core.shutdown()
