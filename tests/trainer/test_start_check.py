"""Before training, one policy: the log-probabilities of trainer, model, reference and engine agree."""

import copy
import json
from contextlib import closing
from functools import partial

import pytest
import torch
from letter_trainer import logged, make_letter_trainer
from peft import LoraConfig, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl.engines.stop_tokens import get_stop_token_ids, get_stop_token_ids_of_checkpoint
from g2po_trl.engines.transformers import model_for_generation


@pytest.fixture
def base(tiny_model_dir):
    """A function that loads the tiny model."""
    return partial(AutoModelForCausalLM.from_pretrained, tiny_model_dir)


@pytest.fixture
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def make(make_trainer, base):
    """`make_trainer` of a model object (default: the tiny one), for one step."""

    def make(model=None, tokenizer=None, folder="out", **options):
        model = base() if model is None else model
        return make_trainer(model=model, processing_class=tokenizer, output=folder, **{"max_steps": 1, **options})

    return make


def changed(model, by=0.3):
    """Change the model's weights, as merging an adapter in memory does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter) * parameter.std())
    return model


@pytest.mark.parametrize("kind", ["changed in memory", "without a file", "resized"])
def test_the_reference_is_the_model_that_was_passed(kind, make, base, tokenizer):
    model = changed(base())
    if kind == "without a file":
        model.config._name_or_path = ""
    if kind == "resized":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
        model.resize_token_embeddings(len(tokenizer))
    trainer = make(model, tokenizer, beta=0.1)
    assert trainer.ref_model.get_input_embeddings().num_embeddings == len(tokenizer)
    trainer.train()
    assert logged(trainer, "kl")[0] < 1e-6


def test_a_model_of_an_earlier_trainer_is_compared_with_itself_as_it_was(make, base):
    model = base()
    make(model, beta=0.1, folder="first", learning_rate=1e-2).train()
    second = make(model, beta=0.1, folder="second", learning_rate=1e-2, max_steps=2)
    start = copy.deepcopy(second.model.state_dict())
    second.train()
    reference = second.ref_model.state_dict()
    assert all(torch.equal(reference[name], weight) for name, weight in start.items())
    assert logged(second, "kl")[0] < 1e-6 < logged(second, "kl")[1]


@pytest.mark.parametrize("kind", ["whole model", "adapter"])
def test_a_reference_has_no_dropout(kind, make, base):
    model = base(attention_dropout=0.5).train()  # from_config's mode
    if kind == "adapter":
        options = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=2, **options))
    trainer = make(model, beta=0.1)
    modes, log_probs = [], trainer.update.log_probs
    score = log_probs.score
    log_probs.score = lambda scoring, batch: modes.append(scoring.training) or score(scoring, batch)
    trainer.train()
    assert modes == [False] and trainer.model.training


def test_a_reference_that_is_not_the_start_is_refused_before_the_first_rollout(make):
    trainer = make(beta=0.1)
    changed(trainer.ref_model)
    with refused("beta"):
        trainer.train()
    assert trainer.iteration.step == 0 and not trainer.state.log_history


def test_what_would_not_train_is_refused(make, base):
    with refused("requires_grad"):
        make(base().requires_grad_(False), beta=0.0)
    with refused("optimizers"):  # of another model
        make(beta=0.0, optimizers=(torch.optim.AdamW(base().parameters()), None))


@pytest.mark.parametrize("by", [1.0, 0.02])
def test_an_engine_with_other_weights_is_refused(by, make, base):
    trainer = make(max_steps=2, beta=0.0)
    trainer.player.actor.engine.generation_model = model_for_generation(changed(base(), by))
    with refused("engine"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_end_of_turn_of_the_template_ends_completions_everywhere(base, tokenizer, tmp_path, caplog):
    """Of a checkpoint fine-tuned from a base model: its template ends turns with <|im_end|>, which is no eos token."""
    folder, model, end = tmp_path / "base", base(), tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id = "<|endoftext|>", 0, 0
    for part in (tokenizer, model):
        part.save_pretrained(folder)
    assert tokenizer.eos_token_id == 0 != end
    assert get_stop_token_ids(tokenizer, model) == {0, end} == get_stop_token_ids_of_checkpoint(tokenizer, str(folder))
    with closing(make_letter_trainer(folder, tmp_path / "out", max_steps=1)) as trainer:
        assert trainer.player.actor.engine.stop_token_ids == {0, end} and "'<|im_end|>'" in caplog.text
        trainer.save_model()
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert sorted(saved["eos_token_id"]) == sorted([0, end]), "servers of the saved model stop there, too"
