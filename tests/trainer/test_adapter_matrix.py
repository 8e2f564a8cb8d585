"""Adapters of every kind: trained, compared with their start, handed to engines, saved, loaded again; or refused."""

import pytest
import torch
from adapter_matrix import FEW, logits, pairs, walk
from letter_trainer import TASKS, logged
from peft import LoraConfig, PeftMixedModel, PeftModel, PrefixTuningConfig, get_peft_model, inject_adapter_in_model
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl.evaluation.chat_models import load_local, load_model
from g2po_trl.evaluation.checkpoints import weights_hash
from g2po_trl.runs.run_json import find_run

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
NOT_FROZEN = ("LoHa", "LoKr", "VeRA")  # by PEFT, however they are loaded: they train
REFUSED = {"frozen": "is_trainable=True", "prefix tuning": "PREFIX_TUNING"}
REFUSED |= {"prompt tuning": "PROMPT_TUNING", "p-tuning": "P_TUNING"}
OF_PEFT = "Cannot set a prompt learning adapter to trainable"  # a saved one is refused by PEFT


@pytest.mark.parametrize("cell", [*FEW, *(pytest.param(one, marks=pytest.mark.slow) for one in pairs())], ids=str)
def test_an_adapter_is_one_policy(cell, tmp_path, tiny_model_dir):
    refusal = walk(cell, tiny_model_dir, tmp_path)
    reasons = [REFUSED[one] for one in (cell.start, cell.kind) if one in REFUSED] + [OF_PEFT] * (cell.kind in REFUSED)
    if refusal is None:
        assert not reasons or cell.kind in NOT_FROZEN
    elif cell.dtype != "4 bit":
        assert refusal.startswith(("ValueError", "G2POError")) and any(one in refusal for one in reasons), refusal


@pytest.fixture
def make(make_trainer):
    def make(model, **options):
        return make_trainer(model=model, **{"beta": 0.1, "learning_rate": 0.05, **options})

    return make


@pytest.fixture
def base(tiny_model_dir):
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_model_dir)


def test_the_best_model_is_found_and_evaluated_whatever_its_adapter_is_called(make, base, tmp_path):
    model = get_peft_model(base(), LORA, adapter_name="policy")
    trainer = make(
        model,
        eval_dataset=TASKS.select(range(2)),
        **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3},
        **{"load_best_model_at_end": True, "metric_for_best_model": "turns", "save_total_limit": 5},
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-1"), "all evaluations are equal: the first stays the best"
    saved = load_file(f"{best}/policy/adapter_model.safetensors")
    now = {name.replace(".policy", ""): one for name, one in model.named_parameters() if "lora_" in name}
    assert saved and all(torch.equal(now[name], one) for name, one in saved.items())
    trainer.save_model()
    out = str(tmp_path / "out")
    trainer.create_model_card()
    assert torch.equal(logits(PeftModel.from_pretrained(base(), out, subfolder="policy")), logits(model))
    for folder in (out, f"{out}/policy"):
        assert load_local(folder).encode.tokenizer.chat_template, "the run's tokenizer"
        assert torch.equal(logits(load_model(folder)), logits(model))
        assert find_run(folder) == tmp_path / "out"
    assert weights_hash(out) != weights_hash(f"{out}/checkpoint-3")


def test_an_adapters_folder_is_trained_further(make, base, tmp_path, tiny_model_dir):
    earlier = get_peft_model(base(), LORA, adapter_name="policy")
    earlier.save_pretrained(tmp_path / "earlier")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "earlier")
    with refused("peft_config"):
        make(str(tmp_path / "earlier"), peft_config=LORA)
    trainer = make(str(tmp_path / "earlier"), max_steps=2)
    assert torch.equal(logits(trainer.model), logits(earlier))
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == 0.0 and kl[1] > 1e-5
    trainer.save_model()
    assert torch.equal(logits(load_model(str(tmp_path / "out"))), logits(trainer.model))


def test_a_resumed_run_keeps_its_reference(make, base, tmp_path):
    def started(seed):
        torch.manual_seed(seed)
        return get_peft_model(base(), LORA)

    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make(started(0), **saving)
    whole.train()
    again = make(started(1), **saving)  # a start that is not seeded
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert logged(again, "kl")[-1] == logged(whole, "kl")[-1] > 1e-5
    assert torch.equal(logits(again.model), logits(whole.model))


def test_of_several_adapters_the_active_one_is_trained_and_saved(make, base, tmp_path):
    model = get_peft_model(base(), LORA)
    for name in ("ref", "policy"):
        model.add_adapter(name, LORA)
    model.set_adapter("policy")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    trainer = make(model, max_steps=1)
    trainer.train()
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved and all(".policy." in name for name in moved)
    trainer.save_model()
    assert [path.parent.name for path in (tmp_path / "out").rglob("adapter_model.safetensors")] == ["policy"]


def several(model):
    model.add_adapter("second", LORA)
    model.base_model.set_adapter(["default", "second"])


REFUSED_MODELS = [
    (several, "active_adapters"),
    (lambda model: model.merge_adapter(), "merged"),
    (lambda model: model.base_model.disable_adapter_layers(), "disable_adapters"),
    (lambda model: model.get_base_model().model.norm.weight.requires_grad_(True), "trained parameters"),
]


def test_adapters_that_would_not_train_or_be_saved_are_refused(make, base):
    for change, field in REFUSED_MODELS:
        model = get_peft_model(base(), LORA)
        change(model)
        with refused(field):
            make(model)
    with refused("sync_ref_model"):
        make(get_peft_model(base(), LORA), sync_ref_model=True)
    for field, model in (
        ("model", inject_adapter_in_model(LORA, base())),  # as transformers' add_adapter does
        ("model", PeftMixedModel(base(), LORA)),
        ("peft_config", get_peft_model(base(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))),
    ):
        with refused(field):
            make(model)
