"""Walk the matrix of adapters: what trains, what is compared with, what an engine gets, and what is saved."""

import itertools
import random
import tempfile
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch
from letter_environment import LETTER_PROMPT, LetterEnvironment
from letter_trainer import TASKS, make_config
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from g2po_trl import G2POError, G2POTrainer
from g2po_trl.engines import adapter_weights
from g2po_trl.evaluation.checkpoints import load_model

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "LoRA": (LoraConfig, {"r": 4, **LAYERS}),
    "rsLoRA": (LoraConfig, {"r": 4, "use_rslora": True, **LAYERS}),
    "DoRA": (LoraConfig, {"r": 4, "use_dora": True, **LAYERS}),
    "PiSSA": (LoraConfig, {"r": 4, "init_lora_weights": "pissa", **LAYERS}),
    "OLoRA": (LoraConfig, {"r": 4, "init_lora_weights": "olora", **LAYERS}),
    # Starts away from the base, as LoftQ does, which computes its start on a GPU.
    "LoftQ-like": (LoraConfig, {"r": 4, "init_lora_weights": False, **LAYERS}),
    "LoRA and biases": (LoraConfig, {"r": 4, "bias": "all", **LAYERS}),
    "LoHa": (LoHaConfig, {"r": 4, **LAYERS}),
    "LoKr": (LoKrConfig, {"r": 4, **LAYERS}),
    "IA3": (IA3Config, {"feedforward_modules": ["down_proj"], **LAYERS}),
    "OFT": (OFTConfig, {"oft_block_size": 16, "r": 0, **LAYERS}),
    "VeRA": (VeraConfig, {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "prompt tuning": (PromptTuningConfig, {"num_virtual_tokens": 4}),
    "prefix tuning": (PrefixTuningConfig, {"num_virtual_tokens": 4}),
    "p-tuning": (PromptEncoderConfig, {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}
STARTS, NAMES = ("fresh", "continued", "frozen"), ("default", "policy")
MODULES = (None, "norm", "embed_tokens", "lm_head")
DTYPES = ("float32", "bfloat16", "4 bit")
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

    def __str__(self) -> str:
        ties = "tied" if self.tied else "untied"
        return f"{self.kind}, {self.start}, {self.name}, {ties}, {self.module or 'no module'}, {self.dtype}"


@dataclass
class Outcome:
    """`refused`: why, if it was; `trains`: trained parameters; `engine`: what it gets; `wrong`: what is not right."""

    refused: str | None = None
    trains: int = 0
    engine: str = ""
    wrong: tuple[str, ...] = ()


def few() -> list[Cell]:
    """Return cells that were wrong, or are refused, each in its own way."""
    return [
        *(
            Cell("PiSSA"),
            Cell("LoRA and biases", dtype="bfloat16"),
            Cell("LoRA", "continued", "policy", module="norm"),
        ),
        *(Cell("VeRA", "continued", tied=False, module="lm_head"), Cell("LoRA", "frozen", "policy")),
        *(Cell("prefix tuning"), Cell("LoRA", tied=False, module="lm_head", dtype="4 bit")),
    ]


def all_cells() -> list[Cell]:
    """Return the whole matrix."""
    return [Cell(*one) for one in itertools.product(KINDS, STARTS, NAMES, (True, False), MODULES, DTYPES)]


def pairs() -> list[Cell]:
    """Return cells in which each value of each axis stands beside each value of the others."""
    chosen, seen, whole = [], set(), all_cells()
    random.Random(0).shuffle(whole)
    for least in (10, 5, 1):
        for cell in whole:
            new = set(itertools.combinations(enumerate(astuple(cell)), 2)) - seen
            if len(new) >= least:
                chosen.append(cell)
                seen |= new
    return sorted(chosen, key=lambda cell: list(KINDS).index(cell.kind))


@cache
def base_folder(tied: bool, tokenizer_folder: str) -> str:
    """Return the folder of a model whose logits have a spread, as a trained one's."""
    from transformers import AutoTokenizer

    folder, tokenizer = tempfile.mkdtemp(prefix="adapter-matrix-"), AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_options(dtype: str) -> dict:
    """Return arguments of `from_pretrained` for a base in this precision."""
    if dtype != "4 bit":
        return {"dtype": getattr(torch, dtype)}
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options), "dtype": torch.float32}


def adapter_config(cell: Cell):
    make, options = KINDS[cell.kind]
    modules = {"modules_to_save": [cell.module]} if cell.module else {}
    return make(task_type="CAUSAL_LM", **options, **modules)


def trainable_on_cpus(model: torch.nn.Module) -> torch.nn.Module:
    """Keep bitsandbytes from repacking weights at the first inference, as on some CPUs: it cannot train then."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def model_of(cell: Cell, base: str, folder: Path):
    """Return what is passed as `model`, and `peft_config`."""
    if cell.start == "fresh" and cell.name == "default" and cell.dtype == "float32":
        return base, adapter_config(cell)
    torch.manual_seed(0)
    model = trainable_on_cpus(AutoModelForCausalLM.from_pretrained(base, **load_options(cell.dtype)))
    model = get_peft_model(model, adapter_config(cell), adapter_name=cell.name)
    if cell.start == "fresh":
        return model, None
    move(model)
    model.save_pretrained(folder / "earlier")
    saved = folder / "earlier" / ("" if cell.name == "default" else cell.name)
    model = trainable_on_cpus(AutoModelForCausalLM.from_pretrained(base, **load_options(cell.dtype)))
    options = {"adapter_name": cell.name, "is_trainable": True} if cell.start == "continued" else {}
    return PeftModel.from_pretrained(model, saved, **options), None


def move(model: torch.nn.Module, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += size * torch.randn(parameter.shape, generator=generator).to(parameter)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    was_training = model.training
    found = model.eval()(torch.arange(5, 45)[None]).logits.float()
    model.train(was_training)
    return found


def walk(cell: Cell, tokenizer_folder: str, folder: Path) -> Outcome:
    """Train a cell for one step and return what was seen."""
    base = base_folder(cell.tied, tokenizer_folder)
    trainer, wrong = None, []
    try:
        model, config = model_of(cell, base, folder)
        trainer = G2POTrainer(
            model,
            make_config(folder / "out", beta=0.1, max_steps=1, learning_rate=1e-2, max_turns=2, disable_tqdm=True),
            TASKS,
            environment_factory=LetterEnvironment,
            prompt_template=LETTER_PROMPT,
            processing_class=tokenizer_of(base),
            peft_config=config,
        )
    except Exception as error:  # PEFT refuses kinds for 4 bits by errors of several classes
        return Outcome(refused=f"{type(error).__name__}: {error}")
    try:
        model = trainable_on_cpus(trainer.model)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        trainer.train()
        moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
        if not moved & trained:
            wrong.append("nothing moved")
        if moved - trained:
            wrong.append("the base moved")
        (kl,) = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        if abs(kl) > 1e-6:
            wrong.append("KL of the first rollout")
        move(model)  # what is compared below is then far from the start
        engine = engine_gets(cell, model)
        trainer.save_model()
        again = load_model(str(folder / "out"), **load_options(cell.dtype))
        off = float((logits(trainable_on_cpus(again)) - logits(model)).abs().mean())
        if off > ROUNDING[cell.dtype] / 10:
            wrong.append(f"saved is not reloaded: {off:.2g}")
        if engine.startswith("wrong"):
            wrong.append(engine)
        return Outcome(None, len(trained), engine, tuple(wrong))
    except Exception as error:
        if isinstance(error, G2POError) and trainer.state.global_step == 0 and not trainer._metrics["train"]:
            return Outcome(refused=f"{type(error).__name__}: {error}")  # by the start check
        return Outcome(wrong=(f"late {type(error).__name__}: {error}",))
    finally:
        trainer.close()


def engine_gets(cell: Cell, model: PeftModel) -> str:
    """Return whether an engine's copy of the base computes what the model does, with the weights that it is sent."""
    if cell.dtype == "4 bit":
        return "refused"  # by check_arguments and WeightSync.check
    try:
        getattr(adapter_weights, "check_mergeable", lambda model: None)(model)
    except ValueError:
        return "refused"
    config = model.config.get_text_config()
    theirs = Qwen2ForCausalLM(Qwen2Config(**config.to_dict())).to(getattr(torch, cell.dtype))
    sent = {name: value.clone() for name, value in adapter_weights.merged_parameters(model)}
    if sent.keys() != dict(theirs.named_parameters()).keys():
        return "wrong names for an engine"
    theirs.load_state_dict(sent, strict=False)
    off = float((logits(theirs) - logits(model)).abs().mean())
    return "right" if off < ROUNDING[cell.dtype] else "wrong numbers for an engine"


@cache
def tokenizer_of(folder: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
