"""Before training, one policy: the log-probabilities of trainer, model, reference and engine agree."""

import copy
import json
import shutil

import pytest
import torch
from letter_trainer import make_letter_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import Trajectory
from g2po_trl.engines.stop_tokens import end_of_turn, get_stop_token_ids, get_stop_token_ids_of_checkpoint
from g2po_trl.engines.transformers import TransformersEngine, model_for_generation


@pytest.fixture
def make(make_trainer, tiny_model_dir):
    """`make_trainer` of a model object (default: the tiny one), for one step."""

    def make(model=None, tokenizer=None, folder="out", **options):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir) if model is None else model
        return make_trainer(model=model, processing_class=tokenizer, output=folder, **{"max_steps": 1, **options})

    return make


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def changed(model, by=0.3):
    """Change the model's weights, as merging an adapter in memory does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter) * parameter.std())
    return model


@pytest.mark.parametrize("kind", ["changed in memory", "without a file"])
def test_the_reference_is_the_model_that_was_passed(kind, make, tiny_model_dir):
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    if kind == "without a file":
        model.config._name_or_path = ""
    trainer = make(model, beta=0.1)
    trainer.train()
    assert logged(trainer, "kl")[0] < 1e-6


def test_the_reference_of_resized_embeddings_has_the_new_tokens(make, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.resize_token_embeddings(len(tokenizer))
    trainer = make(model, tokenizer, beta=0.1)
    assert trainer.ref_model.get_input_embeddings().num_embeddings == len(tokenizer)
    trainer.train()
    assert logged(trainer, "kl")[0] < 1e-6


def test_a_model_of_an_earlier_trainer_is_compared_with_itself_as_it_was(make, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    make(model, beta=0.1, folder="first", learning_rate=1e-2).train()
    second = make(model, beta=0.1, folder="second", learning_rate=1e-2, max_steps=2)
    start = copy.deepcopy(second.model.state_dict())
    second.train()
    reference = second.ref_model.state_dict()
    assert all(torch.equal(reference[name], weight) for name, weight in start.items())
    assert logged(second, "kl")[0] < 1e-6 < logged(second, "kl")[1]


@pytest.mark.parametrize("kind", ["whole model", "adapter"])
def test_a_reference_has_no_dropout(kind, make, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.5).train()  # from_config's mode
    if kind == "adapter":
        targets = ["q_proj", "v_proj"]
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.5, init_lora_weights=False)
        )
    trainer = make(model, beta=0.1)
    score, modes, log_probs = trainer.update.log_probs.score, [], trainer.update.log_probs

    def watched(scoring, micro_batch):
        modes.append(scoring.training)
        return score(scoring, micro_batch)

    log_probs.score = watched
    trainer.train()
    assert modes == [False] and trainer.model.training


def test_a_reference_that_is_not_the_start_is_refused_before_the_first_rollout(make):
    trainer = make(beta=0.1)
    changed(trainer.ref_model)
    with refused("beta"):
        trainer.train()
    assert trainer.iteration.step == 0 and not trainer.state.log_history


def test_training_that_goes_on_is_not_compared_with_its_start(make):
    trainer = make(beta=0.1, learning_rate=1e-2)
    trainer.train()
    trainer.args.overwrite = True
    trainer.train()
    assert logged(trainer, "kl")[-1] > 1e-6


def test_a_frozen_model_is_refused(make, tiny_model_dir, tmp_path):
    def base():
        return AutoModelForCausalLM.from_pretrained(tiny_model_dir)

    get_peft_model(base(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is_trainable=True"):
        make(PeftModel.from_pretrained(base(), tmp_path / "adapter"), beta=0.0)
    with refused("requires_grad"):
        make(base().requires_grad_(False), beta=0.0)


def test_an_optimizer_of_another_model_is_refused(make, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with refused("optimizers"):
        make(model, beta=0.0, optimizers=(torch.optim.AdamW(copy.deepcopy(model).parameters()), None))
    make(model, beta=0.0, optimizers=(torch.optim.AdamW(model.parameters()), None))


@pytest.mark.parametrize("by", [1.0, 0.02])
def test_an_engine_with_other_weights_is_refused(by, make, tiny_model_dir):
    trainer = make(max_steps=2, beta=0.0)
    other = changed(AutoModelForCausalLM.from_pretrained(tiny_model_dir), by)
    trainer.player.actor.engine.generation_model = model_for_generation(other)
    with refused("engine"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_rollout_of_errors_alone_is_not_the_one_that_is_compared(make):
    trainer = make(beta=0.0)
    trainer.start_check.compare(trainer.model, with_reference=False)
    trainer.start_check.compare_engine(trainer.model, [Trajectory("0", [], 0.0, "error")])
    assert not trainer.start_check._has_seen_engine


def test_the_first_rollout_is_compared_and_leaves_no_trace(make, tmp_path):
    trainer = make(max_steps=2, beta=0.0)
    recorded = []
    engine = trainer.player.actor.engine
    generate = TransformersEngine.generate.__get__(engine)

    def watched(*args, **kwargs):
        completions = generate(*args, **kwargs)
        recorded.append(sum(one.logprobs is not None for one in completions))
        return completions

    engine.generate = watched
    trainer.train()
    assert recorded == [8, 8, 0, 0], "two turns of two rollouts"
    lines = (tmp_path / "out" / "trajectories" / "train-000001.jsonl").read_text().splitlines()
    assert all(step.get("logprobs") is None for line in lines for step in json.loads(line)["steps"])
    assert not any("sampling_logp_difference" in name for entry in trainer.state.log_history for name in entry)


def base_with_chatml(tiny_model_dir, folder):
    """A checkpoint fine-tuned from a base model: the template ends turns with <|im_end|>, which is no eos token."""
    shutil.copytree(tiny_model_dir, folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = folder / name
        values = json.loads(path.read_text())
        token = "eos_token" if name == "tokenizer_config.json" else "eos_token_id"
        path.write_text(json.dumps({**values, token: "<|endoftext|>" if token == "eos_token" else 0}))
    return folder


def test_the_end_of_turn_of_the_template_ends_completions_everywhere(tiny_model_dir, tmp_path, caplog):
    folder = base_with_chatml(tiny_model_dir, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == 0 != end
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert get_stop_token_ids(tokenizer, model) == {0, end} == get_stop_token_ids_of_checkpoint(tokenizer, str(folder))
    trainer = make_letter_trainer(folder, tmp_path / "out", max_steps=1)
    try:
        engine = trainer.player.actor.engine
        assert engine.stop_token_ids == {0, end} and "'<|im_end|>'" in caplog.text
        trainer.save_model()
    finally:
        trainer.close()
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert sorted(saved["eos_token_id"]) == sorted([0, end]), "servers of the saved model stop there, too"


def test_an_end_of_turn_is_added_only_where_none_is_known(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizer, [end]) is None and end_of_turn(tokenizer, [0]) == end
    for written, expected in (
        ("{{ m.content }}<|im_end|>\n<|endoftext|>", None),  # a later token of the end is known
        ("{{ m.content }}\n <|im_end|>", end),
        ("{{ m.content }}\n###", None),  # words
        ("{{ m.content }}", None),
    ):
        tokenizer.chat_template = "{% for m in messages %}" + written + "{% endfor %}"
        assert end_of_turn(tokenizer, [0]) == expected, written


def test_a_template_that_ends_turns_in_words_asks_for_a_stop_sequence(make, tiny_model_dir, caplog):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}###{% endfor %}"
    make(tokenizer=tokenizer, beta=0.0)
    assert "ends a turn with '###'" in caplog.text and "stop_sequences=['###']" in caplog.text
    caplog.clear()
    make(tokenizer=tokenizer, beta=0.0, stop_sequences=["###"], folder="with")
    assert "ends a turn" not in caplog.text


def test_completions_that_do_not_end_are_said_at_once_and_at_the_end(make, capsys):
    trainer = make(max_steps=3, beta=0.0, max_completion_length=8)
    trainer.train()
    told = capsys.readouterr().out
    assert told.count("reached max_completion_length") == 2 and "Completions do not end" in trainer.verdict.text
    make(max_steps=1, beta=0.0, max_completion_length=1, folder="one").train()
    assert "reached max_completion_length" not in capsys.readouterr().out, "actions of one token"
