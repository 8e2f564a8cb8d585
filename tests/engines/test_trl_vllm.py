"""The engine around TRL's vLLM wrapper, with a stand-in for the wrapper: weights, sleep, requests and prefix cache."""

import sys
from types import SimpleNamespace

import programs
import pytest
import torch
import vision_models
from refusals import refused
from vision_models import drawing

from g2po_trl.engines import trl_vllm as vllm_engine
from g2po_trl.engines.base import EngineParts
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.trl_vllm import VLLMEngine
from g2po_trl.engines.vllm_requests import RequestEngine
from g2po_trl.prompts.images import ImageEncoder
from g2po_trl.rollout.player import RolloutStats
from g2po_trl.utils.images import as_picture


def test_server_mode_with_unequal_numbers_of_prompts():
    programs.run_script(2, "engine_script.py", timeout=120)  # its own assertions, on both ranks


class SharedParams(SimpleNamespace):
    def clone(self):
        return SharedParams()


@pytest.fixture
def vllm_module(monkeypatch):
    """What requests to vLLM are made of, where vLLM is not installed."""
    params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"), StructuredOutputsParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


class RecordingVLLM:
    """Stands in for TRL's wrapper to see when it is woken, given weights and put to sleep.

    Its vLLM has cached the prompt's length without its last token, and says so. It completes a request a step, the
    last one first. With `tensor_parallel_size` 2 it adds a prompt of 50 tokens for each, before ours, as if the rank
    before had brought it.
    """

    mode, logprobs, structured_outputs_regex, reads = "colocate", 0, None, None

    def __init__(self, prefix_caching=True, tensor_parallel_size=1):
        self.enable_sleep_mode, self._llm_weights_sleeping, self.events = True, True, []
        self.tensor_parallel_size, self.forgets = tensor_parallel_size, True
        self.requests, self.parameters, self.adapters, self.media = {}, [], [], []
        cache_config = SimpleNamespace(enable_prefix_caching=prefix_caching)
        self.llm = SimpleNamespace(
            wake_up=lambda tags: self.events.append(f"wake {tags[0]}"),
            sleep=lambda level: self.events.append(f"sleep {level}"),
            generate=self.answer,
            reset_prefix_cache=lambda: self.events.append("forget") or self.forgets,
            llm_engine=SimpleNamespace(
                vllm_config=SimpleNamespace(cache_config=cache_config),
                add_request=self.add_request,
                step=self.step,
                abort_request=lambda names: self.events.append(f"abort {len(names)}"),
            ),
        )
        self.llm_generate = self.llm.generate

    def add_request(self, name, prompt, parameters, lora_request):
        self.requests[name] = prompt["prompt_token_ids"]
        self.media.append(prompt.get("multi_modal_data"))
        self.adapters.append(lora_request)
        self.parameters.append(parameters)

    def step(self):
        name, prompt = self.requests.popitem()
        self.events.append(f"answer {len(prompt)} asleep={self.enable_sleep_mode}")
        answer = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}])
        return [
            SimpleNamespace(finished=False),
            SimpleNamespace(
                request_id=name,
                finished=True,
                outputs=[answer],
                num_cached_tokens=len(prompt) - 1,
                prompt_token_ids=self.reads,
            ),
        ]

    def answer(self, prompts, sampling_params, **options):
        self.adapters += [options.get("lora_request")] * (len(prompts) // self.tensor_parallel_size)
        return [SimpleNamespace(num_cached_tokens=len(prompt) - 1) for prompt in prompts]

    def sync_weights(self):
        self.events.append("weights")

    def generate(self, prompts, images, num_generations):
        self.events.append(f"generate {len(prompts)} asleep={self.enable_sleep_mode}")
        others = [[0] * 50] * (len(prompts) * (self.tensor_parallel_size - 1))
        self.llm.generate(others + prompts, sampling_params=SharedParams())
        return prompts, [[7]] * len(prompts), [[[-1.0]]] * len(prompts), None


def engine_of(vllm, options=None):
    parts = EngineParts(
        args=SimpleNamespace(generation_kwargs=options, seed=0),
        tokenizer=SimpleNamespace(decode=lambda ids: "", pad_token_id=0),
        stop_token_ids=[7],
        accelerator=SimpleNamespace(process_index=1),
        model=lambda: torch.nn.Linear(1, 1),
        generation_model=None,
        vllm=vllm,
        image_inputs=None,
    )
    return VLLMEngine(parts)


def test_an_option_that_vllm_does_not_have_is_named(vllm_module, monkeypatch):
    def refuse(no_repeat_ngram_size=None, **known):
        if no_repeat_ngram_size is not None:
            raise TypeError("Unexpected keyword argument 'no_repeat_ngram_size'")  # as vLLM 0.31 does

    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", refuse)
    with refused("generation_kwargs"):
        engine_of(RecordingVLLM(), {"no_repeat_ngram_size": 3}).generate([[1]], Sampling())


def test_vllm_generates_for_prompts_with_images_unless_ranks_share_it(vllm_module):
    vllm, image = RecordingVLLM(), SimpleNamespace(open=lambda: "pixels")
    engine = engine_of(vllm)
    engine.images = SimpleNamespace(token_ids=[3], unexpanded=lambda prompt, images: [3, *prompt])
    engine._read = lambda prompt, sampling, output: prompt
    assert engine.generate([[1], [2, 2]], Sampling(), [5, 6], images=[[image], []]) == [[1], [2, 2]]
    assert vllm.media == [{"image": ["pixels"]}, None]
    assert [parameters.seed for parameters in vllm.parameters] == [5, 6]
    with refused("images"):
        engine_of(RecordingVLLM(tensor_parallel_size=2)).generate([[1]], Sampling(), [5], images=[[image]])


SENT = {
    **{"temperature": 0.2, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 512},
    **{"stop_token_ids": [7], "stop": ["</action>"], "include_stop_str_in_output": True, "frequency_penalty": 0.1},
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_is_awake_for_a_whole_rollout(monkeypatch, vllm_module, ranks):
    monkeypatch.setattr(vllm_engine, "gather_object", lambda own: own * ranks)
    vllm = RecordingVLLM(tensor_parallel_size=ranks)
    options = {"frequency_penalty": 0.1, "structured_outputs": {"json": "…"}}
    engine = engine_of(vllm, options)
    with engine.rollout():
        completions = engine.generate([[1], [2, 2]], Sampling(), [5, 6])
        assert [completion.cached_tokens for completion in completions] == [0, 1]
        assert engine.generate([], Sampling()) == []
        engine.generate([[1]], Sampling(temperature=0.2, stop_sequences=("</action>",)))
    asked = ["answer 2", "answer 1", "answer 1"] if ranks == 1 else ["generate 2", "generate 1"]
    asked = [f"{event} asleep=False" for event in asked]
    assert vllm.events == ["weights", "forget", "wake kv_cache", *asked, "sleep 2"]
    assert vllm.enable_sleep_mode and vllm._llm_weights_sleeping and engine.streams == (ranks == 1)
    assert vllm.llm.generate is vllm.llm_generate, "not listened to any more"
    if ranks == 1:
        assert [parameters.seed for parameters in vllm.parameters] == [5, 6, None]
        last = {"logprobs": 0, "seed": None, "output_kind": "final"}
        assert vars(vllm.parameters[-1]) == SENT | {"structured_outputs": {"json": "…"}} | last
    else:
        assert vllm.generation_kwargs == SENT | {"structured_outputs": {"json": "…"}}
    uncached = engine_of(RecordingVLLM(False, ranks)).generate([[1, 2]], Sampling())
    assert [completion.cached_tokens for completion in uncached] == [None]


def test_what_a_rollout_leaves_unanswered_is_abandoned(vllm_module):
    vllm = RecordingVLLM()
    engine = engine_of(vllm)
    with engine.rollout():
        for key in (3, 4, 5):
            engine.submit(key, [1] * key, Sampling(), seed=key)
        (answered,) = engine.poll(0.0).items()
        assert answered[0] == 5 and answered[1].ids == [7] and answered[1].logprobs == [-1.0]
    assert vllm.events[-2:] == ["abort 2", "sleep 2"]
    with engine.rollout():
        assert engine.poll(0.0) == {}
    vllm.step, vllm.llm.llm_engine.step = None, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate([[1], [2]], Sampling())
    assert vllm.events[-1] == "abort 2"


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rollout_is_answered_by_the_adapter_of_its_time(monkeypatch, vllm_module, ranks):
    monkeypatch.setattr(vllm_engine, "gather_object", lambda own: own * ranks)
    vllm, versions = RecordingVLLM(tensor_parallel_size=ranks), iter("ab")
    engine = engine_of(vllm)
    engine.generate([[1]], Sampling())
    engine.adapter = SimpleNamespace(load=lambda: next(versions))
    for _ in range(2):
        with engine.rollout():
            engine.generate([[1], [2]], Sampling())
    assert vllm.adapters == [None, "a", "a", "b", "b"]


def test_a_rollout_in_a_rollout_hands_on_no_weights(vllm_module):
    """A panel's parts are played with the same weights; the next rollout gets those of its own time."""
    vllm = RecordingVLLM()
    engine = engine_of(vllm)
    with engine.rollout():
        for _ in range(3):
            with engine.rollout():
                engine.generate([[1]], Sampling())
    events = [event for event in vllm.events if not event.startswith("answer")]
    assert events == ["weights", "forget", "wake kv_cache", "sleep 2"]
    with engine.rollout():
        pass
    assert vllm.events.count("weights") == vllm.events.count("forget") == 2
    with pytest.raises(RuntimeError, match="broken"), engine.rollout(), engine.rollout():
        raise RuntimeError("broken")
    assert vllm.events[-1] == "sleep 2"
    with engine.rollout():
        assert vllm.events.count("weights") == 4, "after an error too"


def test_a_cache_that_cannot_be_forgotten_is_not_used():
    vllm = RecordingVLLM()
    vllm.forgets = False
    with pytest.raises(RuntimeError, match="prefix cache of the previous weights"), engine_of(vllm).rollout():
        raise AssertionError("nothing is played")
    assert vllm.events == ["weights", "forget"]


def test_hit_fraction_over_ranks():
    """By tokens; a rank without prompts has no part in it."""
    ranks = [RolloutStats(cacheable_tokens=300, cached_tokens=100), RolloutStats(cacheable_tokens=100), RolloutStats()]
    assert RolloutStats.over_ranks(ranks).metrics()["rollout/prefix_cache_hit_fraction"] == 0.25
    assert ranks[1].metrics()["rollout/prefix_cache_hit_fraction"] == 0
    assert "rollout/prefix_cache_hit_fraction" not in ranks[2].metrics()


SHOWN = [as_picture(drawing(seed, 24 * seed)) for seed in (1, 2)]


def test_an_image_is_one_token_and_what_vllm_makes_of_it_is_compared(vllm_module):
    encoder, vllm = ImageEncoder(vision_models.FAMILIES["Qwen2.5-VL"]()[0]), RecordingVLLM()
    text = f"a {encoder.token}b{encoder.token}"
    ids = encoder.ids([text], SHOWN)
    engine = RequestEngine(encoder.processor.tokenizer, [1], {"logit_bias": {7: 1.0}})
    engine.core, vllm.reads = vllm.llm.llm_engine, ids
    assert engine.reads_text_because is not None
    engine.read_images(encoder)
    assert engine.reads_text_because is None and engine.processing_class is encoder.processor
    engine.submit(3, ids, Sampling(), 5, images=SHOWN)
    (asked,), (media,), (parameters,) = vllm.requests.values(), vllm.media, vllm.parameters
    assert asked == encoder.processor.tokenizer(text)["input_ids"]
    assert [image.size for image in media["image"]] == [(24, 16), (48, 16)]
    assert parameters.seed == 5 and parameters.logit_bias == {7: 1.0, **dict.fromkeys(encoder.token_ids, -100.0)}
    assert engine.poll(0)[3].ids == [7]
    vllm.reads = ids[1:]
    engine.submit(4, ids, Sampling(), images=SHOWN)
    with refused("processing_class"):
        engine.poll(0)
