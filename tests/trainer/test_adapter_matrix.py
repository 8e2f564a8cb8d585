"""Adapters of every kind: trained, compared with their start, handed to engines, saved, loaded again; or refused."""

import pytest
import torch
from adapter_matrix import Cell, Outcome, all_cells, few, logits, pairs, walk
from letter_trainer import TASKS
from peft import LoraConfig, PeftMixedModel, PeftModel, PrefixTuningConfig, get_peft_model, inject_adapter_in_model
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl.evaluation.chat_models import load_local
from g2po_trl.evaluation.checkpoints import load_model, weights_hash
from g2po_trl.runs.run_json import find_run

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
NOT_FROZEN = ("LoHa", "LoKr", "VeRA")  # by PEFT, however they are loaded: they train
REFUSED = {
    "frozen": "is_trainable=True",
    "prefix tuning": "PREFIX_TUNING",
    "prompt tuning": "PROMPT_TUNING",
    "p-tuning": "P_TUNING",
}


def check(cell: Cell, outcome: Outcome) -> None:
    assert not outcome.wrong, outcome.wrong
    reason = REFUSED.get(cell.start) or REFUSED.get(cell.kind)
    if outcome.refused is None:
        assert outcome.trains > 0 and (reason is None or cell.kind in NOT_FROZEN)
        apart = cell.tied and cell.module in ("embed_tokens", "lm_head")
        assert outcome.engine == ("refused" if apart or cell.dtype == "4 bit" else "right")
    elif cell.dtype != "4 bit":
        assert reason is not None and outcome.refused.startswith(("ValueError", "G2POError")), outcome.refused


@pytest.mark.parametrize("cell", few(), ids=str)
def test_an_adapter_is_one_policy(cell, tmp_path, tiny_model_dir):
    outcome = walk(cell, str(tiny_model_dir), tmp_path)
    check(cell, outcome)
    reason = REFUSED.get(cell.start) or REFUSED.get(cell.kind)
    assert reason is None or reason in outcome.refused


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*pairs(), *(one for one in all_cells() if one.dtype == "float32")], ids=str)
def test_all_adapters_are_one_policy(cell, tmp_path, tiny_model_dir):
    check(cell, walk(cell, str(tiny_model_dir), tmp_path))


@pytest.fixture
def make(make_trainer):
    def make(model, **options):
        return make_trainer(model=model, **{"beta": 0.1, "learning_rate": 0.05, **options})

    return make


@pytest.fixture
def base(tiny_model_dir):
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_model_dir)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


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
    assert any(not torch.equal(one, saved[name]) for name, one in load_file(last_of(tmp_path)).items())
    trainer.save_model()
    out = str(tmp_path / "out")
    trainer.create_model_card()
    assert torch.equal(logits(PeftModel.from_pretrained(base(), out, subfolder="policy")), logits(model))
    for folder in (out, f"{out}/policy"):
        chat = load_local(folder)
        assert chat.encode.tokenizer.chat_template, "the run's tokenizer"
        assert torch.equal(logits(load_model(folder)), logits(model))
        assert find_run(folder) == tmp_path / "out"
    assert weights_hash(out) != weights_hash(f"{out}/checkpoint-3")
    trainer.state.best_model_checkpoint = f"{out}/deleted"
    trainer._load_best_model()  # with transformers' warning
    assert torch.equal(logits(PeftModel.from_pretrained(base(), out, subfolder="policy")), logits(model))


def last_of(tmp_path):
    return tmp_path / "out" / "checkpoint-3" / "policy" / "adapter_model.safetensors"


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


def several(base):
    model = get_peft_model(base, LORA)
    model.add_adapter("second", LORA)
    model.base_model.set_adapter(["default", "second"])
    return model


def merged(base):
    model = get_peft_model(base, LORA)
    model.merge_adapter()
    return model


def disabled(base):
    model = get_peft_model(base, LORA)
    model.base_model.disable_adapter_layers()
    return model


def unsaved(base):
    model = get_peft_model(base, LORA)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def injected(base):
    return inject_adapter_in_model(LORA, base)  # as transformers' add_adapter does


WRONG = {
    several: "active_adapters",
    merged: "merged",
    disabled: "disable_adapters",
    unsaved: "trained parameters",
    injected: "model",
    lambda base: PeftMixedModel(base, LORA): "model",
    lambda base: get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)): "peft_config",
}


@pytest.mark.parametrize("make_model", WRONG, ids=lambda make_model: make_model.__name__)
def test_models_whose_adapters_would_not_train_or_be_saved_are_refused(make_model, make, base, tmp_path):
    with refused(WRONG[make_model]):
        make(make_model(base()))


def test_sync_ref_model_is_refused(make, base):
    with refused("sync_ref_model"):
        make(get_peft_model(base(), LORA), sync_ref_model=True)
