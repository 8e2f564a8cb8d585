"""The transformers engine: where a completion ends, and which sampling options have an effect."""

from dataclasses import fields, replace
from string import ascii_lowercase
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tokenizer
from letter_environment import LongLetterEnvironment
from peft import LoraConfig
from refusals import refused
from transformers import AutoModelForCausalLM, GenerationConfig

from g2po_trl import G2POConfig
from g2po_trl.engines.base import Engine
from g2po_trl.engines.registry import ENGINES
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.engines.vllm_requests import vllm_options


def prompts_of(trainer, *texts):
    return [trainer.processing_class(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("text", "kept", "complete"),
    [
        ("go<|im_end|>", "go<|im_end|>", True),
        ("go<|im_end|><|im_end|>north", "go<|im_end|>", True),
        ("go north", "go north", False),
        ("go</a> north<|im_end|>", "go</a>", True),
        ("go<|im_end|></a>", "go<|im_end|>", True),
        ("</a></a>", "</a>", True),
        ("go.STOP</a>", "go.STOP", True),
    ],
)
def test_where_a_completion_ends(text, kept, complete):
    tokenizer = build_tokenizer()
    engine, sampling = Engine(tokenizer, [tokenizer.eos_token_id]), Sampling(stop_sequences=("</a>", "STOP"))
    ids = tokenizer(text)["input_ids"]
    completion = engine._completion(sampling, ids, [-float(i) for i in range(len(ids))])
    assert tokenizer.decode(completion.ids) == kept and completion.complete is complete
    assert completion.logprobs == [-float(i) for i in range(len(completion.ids))]
    ids = tokenizer("</a> go<|im_end|>x")["input_ids"]
    assert tokenizer.decode(engine._completion(Sampling(), ids).ids) == "</a> go<|im_end|>", "no stop sequences"


def test_generate_stops_at_stop_sequences(make_trainer):
    """With every letter a stop sequence, a completion ends with the first; nothing after it is trained."""
    trainer = make_trainer(LongLetterEnvironment, stop_sequences=list(ascii_lowercase), max_completion_length=40)
    torch.manual_seed(0)
    prompts, decode = prompts_of(trainer, "go", "take the key", "open") * 4, trainer.processing_class.decode
    completions = trainer.player.actor.engine.generate(prompts, trainer.sampling)
    stopped = [completion for completion in completions if set(decode(completion.ids)) & set(ascii_lowercase)]
    assert len(stopped) > 6
    for completion in stopped:
        assert completion.complete and not set(decode(completion.ids[:-1])) & set(ascii_lowercase)


CONFIG = {"bf16": False, "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 8}


def test_evaluation_samples_as_it_is_told(tmp_path):
    args = G2POConfig(str(tmp_path), top_k=5, top_p=0.9, **CONFIG)
    assert Sampling.of(args) == Sampling(1.0, 0.9, 5, None, max_completion_length=args.max_completion_length)
    assert args.evaluation_sampling() == replace(Sampling.of(args), temperature=0.4)
    args = G2POConfig(str(tmp_path), top_k=5, eval_top_k=0, eval_top_p=0.5, eval_temperature=0.0, **CONFIG)
    assert args.evaluation_sampling() == Sampling(0.0, 0.5, 0, None, max_completion_length=args.max_completion_length)


GREEDY = Sampling(temperature=0.0, max_completion_length=12)


def test_the_checkpoints_own_sampling_defaults_have_no_part_in_it(make_trainer, tiny_model_dir, tmp_path):
    """A base model that may not say anything twice: the trainer does not know, so completions must not."""
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    for kwargs in ({}, {"peft_config": lora}):
        trainer = make_trainer(**kwargs)
        prompts = prompts_of(trainer, "go north", "take key")
        expected = trainer.player.actor.engine.generate(prompts, GREEDY)
        model = trainer.model.get_base_model() if kwargs else trainer.model
        strange = GenerationConfig(no_repeat_ngram_size=1, repetition_penalty=3.0, min_p=0.5, suppress_tokens=[5])
        model.generation_config = trainer.model.generation_config = strange
        assert trainer.player.actor.engine.generate(prompts, GREEDY) == expected
        assert model.generation_config is trainer.model.generation_config is strange, "put back"
        again = trainer.model.generate(torch.tensor(prompts[:1]), max_new_tokens=12, pad_token_id=0)
        assert again[0, len(prompts[0]) :].tolist() != expected[0].ids, "it would have made a difference"


def test_an_engine_needs_no_trainer(tiny_model_dir):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval(), build_tokenizer()
    prompts = tokenizer(["go north", "take"])["input_ids"]
    engine, sampling = TransformersEngine.from_model(model, tokenizer), Sampling(0.0, max_completion_length=5)
    together = engine.generate(prompts, sampling)
    assert [len(completion.ids) for completion in together] == [5, 5]
    assert together == [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert engine._generate(model, engine.to_engine(sampling), []) == []


OTHERWISE = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 2.0}
OTHERWISE |= {"max_completion_length": 3, "stop_sequences": ["."]}


@pytest.mark.parametrize("name", [one.name for one in fields(Sampling)])
def test_every_option_of_a_sampling_reaches_every_engine(name):
    engine = TransformersEngine(build_tokenizer(), [2], None)
    one, other = Sampling(), Sampling(**{name: OTHERWISE[name]})
    assert engine.to_engine(one) != engine.to_engine(other) and vllm_options(one, [2]) != vllm_options(other, [2])


def test_an_engine_without_log_probabilities_cannot_be_corrected(tmp_path, monkeypatch):
    """TRL's loss would miss them after a whole rollout."""
    monkeypatch.setitem(ENGINES, "transformers", SimpleNamespace(load=lambda: Engine, options={}))
    with refused("vllm_importance_sampling_correction"):
        G2POConfig(str(tmp_path), **CONFIG)
    G2POConfig(str(tmp_path), vllm_importance_sampling_correction=False, **CONFIG)
