"""LoRA and QLoRA: the adapter alone is trained, saved and loadable; the base stays what it was, to the bit."""

import pytest
import torch
from families import FAMILIES
from letter_trainer import logged
from peft import LoraConfig, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from trl.trainer.utils import create_model_from_path

from g2po_trl.evaluation.chat_models import load_model

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
OPTIONS = {"peft_config": LORA, "learning_rate": 1e-2, "beta": 0.1}


@pytest.mark.parametrize("family", ["Qwen3.5, images", "Gemma-3, images"])
def test_an_adapter_is_evaluated_on_the_base_it_was_trained_on(family, tmp_path):
    """Of Qwen3.5 AutoModelForCausalLM takes the text part, where the adapter's weights find no place."""
    FAMILIES[family].build().save_pretrained(tmp_path / "base")
    base = create_model_from_path(str(tmp_path / "base"))  # as the trainer does
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    trained = get_peft_model(base, lora).eval()
    trained.save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), dtype="float32").eval()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad(), trained.disable_adapter():
        without = trained(input_ids=ids).logits
    with torch.no_grad():
        expected, logits = trained(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.equal(logits, expected) and not torch.allclose(expected, without, atol=1e-3)


def test_an_adapter_that_does_not_fit_its_base_is_refused(tmp_path):
    FAMILIES["Qwen2"].build().save_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(create_model_from_path(str(tmp_path / "base")), lora).save_pretrained(tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    renamed = {name.replace("model.layers", "model.language_model.layers"): w for name, w in weights.items()}
    save_file(renamed, tmp_path / "adapter" / "adapter_model.safetensors")
    with refused("model"):
        load_model(str(tmp_path / "adapter"))


def test_qlora(make_trainer):
    """Quantized layers compute in bfloat16, and all else in float32. A resumed run is the one that was not."""
    bnb = pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes: pip install -e '.[qlora]'")
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    saved = {**OPTIONS, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}

    def run(output, max_steps):
        options = {**saved, "quantization_config": quantization, "max_steps": max_steps}
        trainer = make_trainer(output=output, **options)
        quantized = [m for m in trainer.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
        assert quantized, "nothing was quantized"
        for module in quantized:  # on some CPUs it repacks weights at the first inference, and cannot train on them
            module.support_avx512bf16_for_cpu = False
        packed = [module.weight.detach().clone() for module in quantized]
        assert all(weight.dtype == torch.uint8 for weight in packed)
        trainer.train(resume_from_checkpoint="auto")
        assert all(torch.equal(module.weight, weight) for module, weight in zip(quantized, packed))
        return trainer

    trainer = run("out", 3)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5
    assert trainer.update.layout.kind == "shared"
    run("parts", 2)
    both = (run("parts", 3).model.named_parameters(), trainer.model.named_parameters())
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*both, strict=True))
