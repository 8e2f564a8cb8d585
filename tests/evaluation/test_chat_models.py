"""Models in this process: what ends with them, and whose processor they take."""

import sys
from types import SimpleNamespace

import pytest
import vision_models

from g2po_trl.evaluation.chat_models import load_vllm


@pytest.fixture
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


class FakeVLLM:
    """As much of `vllm.LLM` as loading needs; counts how often its processes are ended."""

    def __init__(self, tokenizer):
        self.ended = 0
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=self.shutdown),
            model_config=SimpleNamespace(max_model_len=64, is_multimodal_model=False),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
        )
        self.tokenizer = tokenizer

    def get_tokenizer(self):
        if self.tokenizer is None:
            raise OSError("no tokenizer")
        return self.tokenizer

    def shutdown(self):
        self.ended += 1


def test_processes_of_vllm_end_with_the_model_and_if_it_cannot_be_loaded(tokenizer, monkeypatch):
    """Python waits for them at its exit, so that a program that leaves one never ends."""
    vllm = FakeVLLM(tokenizer)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda model, **options: vllm))
    chat = load_vllm("nowhere")
    assert vllm.ended == 0
    chat.close()
    assert vllm.ended == 1
    with pytest.raises(ValueError, match="nosuch"):
        load_vllm("nowhere", chat_template_kwargs={"nosuch": 1})
    assert vllm.ended == 2
    vllm.tokenizer = None
    with pytest.raises(OSError, match="no tokenizer"):
        load_vllm("nowhere")
    assert vllm.ended == 3


@pytest.mark.parametrize("of", ["model", "tokenizer"])
def test_images_are_written_by_the_models_processor_if_the_tokenizers_folder_has_none(of, tmp_path, monkeypatch):
    """An adapter's folder has its tokenizer, and may lack the processor that its base has."""
    processor = vision_models.gemma3()[0]
    for name in ("model", "tokenizer"):
        (processor if name in ("model", of) else processor.tokenizer).save_pretrained(tmp_path / name)
    vllm = FakeVLLM(processor.tokenizer)
    places = {name: str(tmp_path / name) for name in ("model", "tokenizer")}
    vllm.llm_engine.model_config = SimpleNamespace(max_model_len=64, is_multimodal_model=True, **places)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda model, **options: vllm))
    chat = load_vllm(str(tmp_path / "model"))
    assert chat.engine.reads_text_because is None and chat.encode.images is not None
