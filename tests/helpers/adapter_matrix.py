"""Walk the matrix of adapters: what trains, what is compared with, what an engine gets, and what is saved."""

import itertools
import random
import tempfile
from contextlib import closing, nullcontext
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from letter_trainer import make_letter_trainer, move_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen2ForCausalLM

from g2po_trl import G2POError
from g2po_trl.engines import adapter_weights
from g2po_trl.evaluation.chat_models import load_model
from g2po_trl.utils.forward_pass import evaluation_mode

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "LoRA": (peft.LoraConfig, {"r": 4, **LAYERS}),
    "rsLoRA": (peft.LoraConfig, {"r": 4, "use_rslora": True, **LAYERS}),
    "DoRA": (peft.LoraConfig, {"r": 4, "use_dora": True, **LAYERS}),
    "PiSSA": (peft.LoraConfig, {"r": 4, "init_lora_weights": "pissa", **LAYERS}),
    "OLoRA": (peft.LoraConfig, {"r": 4, "init_lora_weights": "olora", **LAYERS}),
    # Starts away from the base, as LoftQ does, which computes its start on a GPU.
    "LoftQ-like": (peft.LoraConfig, {"r": 4, "init_lora_weights": False, **LAYERS}),
    "LoRA and biases": (peft.LoraConfig, {"r": 4, "bias": "all", **LAYERS}),
    "LoHa": (peft.LoHaConfig, {"r": 4, **LAYERS}),
    "LoKr": (peft.LoKrConfig, {"r": 4, **LAYERS}),
    "IA3": (peft.IA3Config, {"feedforward_modules": ["down_proj"], **LAYERS}),
    "OFT": (peft.OFTConfig, {"oft_block_size": 16, "r": 0, **LAYERS}),
    "VeRA": (peft.VeraConfig, {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "prompt tuning": (peft.PromptTuningConfig, {"num_virtual_tokens": 4}),
    "prefix tuning": (peft.PrefixTuningConfig, {"num_virtual_tokens": 4}),
    "p-tuning": (peft.PromptEncoderConfig, {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}
STARTS, NAMES = ("fresh", "continued", "frozen"), ("default", "policy")
MODULES = (None, "norm", "embed_tokens", "lm_head")
# Mean difference of logits, of a size of about 1, that the base's dtype explains; after loading, a tenth of it. Beside
# quantized weights TRL trains in bfloat16, and PEFT loads what was saved in float32.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "4 bit": 0.2}


@dataclass(frozen=True)
class Cell:
    kind: str
    start: str = "fresh"
    name: str = "default"
    tied: bool = True
    module: str | None = None
    dtype: str = "float32"


# Cells that were wrong, or are refused, each in its own way.
FEW = (
    Cell("LoRA"),
    Cell("PiSSA"),
    Cell("LoRA and biases", dtype="bfloat16"),
    Cell("LoRA", "continued", "policy", module="norm"),
    Cell("VeRA", "continued", tied=False, module="lm_head"),
    Cell("LoRA", "frozen", "policy"),
    Cell("prefix tuning"),
    Cell("LoRA", tied=False, module="lm_head", dtype="4 bit"),
)


def pairs() -> list[Cell]:
    """Return cells in which each value of each axis stands beside each value of the others."""
    chosen, seen = [], set()
    whole = [Cell(*one) for one in itertools.product(KINDS, STARTS, NAMES, (True, False), MODULES, ROUNDING)]
    random.Random(0).shuffle(whole)
    for least in (10, 5, 1):
        for cell in whole:
            new = set(itertools.combinations(enumerate(astuple(cell)), 2)) - seen
            if len(new) >= least:
                chosen.append(cell)
                seen |= new
    return sorted(chosen, key=lambda cell: list(KINDS).index(cell.kind))


@cache
def base_folder(tied: bool, tiny_model: Path) -> str:
    """Return the folder of a model whose logits have a spread, as a trained one's."""
    folder, config = tempfile.mkdtemp(prefix="adapter-matrix-"), AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings, config.initializer_range = tied, 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def load_options(dtype: str) -> dict:
    if dtype != "4 bit":
        return {"dtype": getattr(torch, dtype)}
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options), "dtype": torch.float32}


def trainable_on_cpus(model: torch.nn.Module) -> torch.nn.Module:
    """Keep bitsandbytes from repacking weights at the first inference: it cannot train then."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def model_of(cell: Cell, base: str, folder: Path):
    make, options = KINDS[cell.kind]
    config = make(task_type="CAUSAL_LM", modules_to_save=[cell.module] if cell.module else None, **options)
    if cell.start == "fresh" and cell.name == "default" and cell.dtype == "float32":
        return base, config

    def load():
        return trainable_on_cpus(AutoModelForCausalLM.from_pretrained(base, **load_options(cell.dtype)))

    torch.manual_seed(0)
    model = peft.get_peft_model(load(), config, adapter_name=cell.name)
    if cell.start == "fresh":
        return model, None
    move_weights(model)
    model.save_pretrained(folder / "earlier")
    saved = folder / "earlier" / ("" if cell.name == "default" else cell.name)
    options = {"adapter_name": cell.name, "is_trainable": True} if cell.start == "continued" else {}
    return peft.PeftModel.from_pretrained(load(), saved, **options), None


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    with evaluation_mode(model):
        return model(torch.arange(5, 45)[None]).logits.float()


def off(one: torch.nn.Module, other: torch.nn.Module) -> float:
    return float((logits(one) - logits(other)).abs().mean())


def walk(cell: Cell, tiny_model: Path, folder: Path) -> str | None:
    """Train a cell for one step, and compare; return why it is refused, if it is."""
    base = base_folder(cell.tied, tiny_model)
    options = {"beta": 0.1, "max_steps": 1, "learning_rate": 1e-2, "max_turns": 2, "disable_tqdm": True}
    options["processing_class"] = AutoTokenizer.from_pretrained(base)
    try:
        model, config = model_of(cell, base, folder)
        trainer = make_letter_trainer(model, folder / "out", peft_config=config, **options)
    except Exception as error:  # PEFT refuses kinds for 4 bits by errors of several classes
        return f"{type(error).__name__}: {error}"
    with closing(trainer):
        model = trainable_on_cpus(trainer.model)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        try:
            trainer.train()
        except G2POError as error:
            assert trainer.state.global_step == 0 and not trainer._metrics["train"], "the start check refuses it"
            return f"{type(error).__name__}: {error}"
        moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
        assert moved and moved <= trained, "the base moved"
        (kl,) = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert abs(kl) <= 1e-6
        move_weights(model)  # what is compared below is then far from the start
        check_engine(cell, model)
        trainer.save_model()
        again = trainable_on_cpus(load_model(str(folder / "out"), **load_options(cell.dtype)))
        assert off(again, model) <= ROUNDING[cell.dtype] / 10


def check_engine(cell: Cell, model: peft.PeftModel) -> None:
    """Check that an engine's copy of the base computes what the model does, with the weights that it is sent."""
    if cell.dtype == "4 bit":
        return  # refused by check_arguments and WeightSync.check
    apart = cell.tied and cell.module in ("embed_tokens", "lm_head")
    with pytest.raises(ValueError) if apart else nullcontext():
        adapter_weights.check_mergeable(model)
    if apart:
        return
    theirs = Qwen2ForCausalLM(model.config).to(getattr(torch, cell.dtype))
    sent = {name: value.clone() for name, value in adapter_weights.merged_parameters(model)}
    assert sent.keys() == dict(theirs.named_parameters()).keys()
    theirs.load_state_dict(sent, strict=False)
    assert off(theirs, model) < ROUNDING[cell.dtype]
