"""The engine around TRL's vLLM wrapper, with a stand-in for the wrapper: weights, sleep, requests and prefix cache."""

import sys
from types import SimpleNamespace

import programs
import pytest
import torch
import vision_models
from letter_environment import drawing
from refusals import refused

from g2po_trl.engines.base import EngineParts
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.trl_vllm import VLLMEngine
from g2po_trl.engines.vllm_requests import RequestEngine
from g2po_trl.prompts.images import ImageEncoder
from g2po_trl.utils.images import as_picture


def test_server_mode_with_unequal_numbers_of_prompts():
    programs.run_script(2, "engine_script.py", timeout=120)  # its own assertions, on both ranks


@pytest.fixture
def vllm_module(monkeypatch):
    """What requests to vLLM are made of, where vLLM is not installed."""
    params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"), StructuredOutputsParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


class RecordingVLLM:
    """Stands in for TRL's wrapper to see when it is woken, given weights and put to sleep.

    Its vLLM has cached the prompt's length without its last token, and says so. It completes a request a step, the
    last one first.
    """

    mode, logprobs, structured_outputs_regex, reads, tensor_parallel_size = "colocate", 0, None, None, 1

    def __init__(self, prefix_caching=True):
        self.enable_sleep_mode, self._llm_weights_sleeping, self.events, self.forgets = True, True, [], True
        self.requests, self.parameters, self.adapters, self.media = {}, [], [], []
        cache_config = SimpleNamespace(enable_prefix_caching=prefix_caching)
        self.llm = SimpleNamespace(
            wake_up=lambda tags: self.events.append(f"wake {tags[0]}"),
            sleep=lambda level: self.events.append(f"sleep {level}"),
            reset_prefix_cache=lambda: self.events.append("forget") or self.forgets,
            llm_engine=SimpleNamespace(
                vllm_config=SimpleNamespace(cache_config=cache_config),
                add_request=self.add_request,
                step=self.step,
                abort_request=lambda names: self.events.append(f"abort {len(names)}"),
            ),
        )

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

    def sync_weights(self):
        self.events.append("weights")


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


SENT = {
    **{"temperature": 0.2, "top_k": 3, "max_tokens": 512, "stop_token_ids": [7], "stop": ["</action>"]},
    **{"include_stop_str_in_output": True, "skip_special_tokens": False, "frequency_penalty": 0.1},
}


def test_vllm_is_awake_for_a_whole_rollout(vllm_module):
    vllm = RecordingVLLM()
    options = {"frequency_penalty": 0.1, "structured_outputs": {"json": "…"}}
    engine = engine_of(vllm, options)
    with engine.rollout():
        completions = engine.generate([[1], [2, 2]], Sampling(), [5, 6])
        assert [completion.cached_tokens for completion in completions] == [0, 1]
        assert engine.generate([], Sampling()) == []
        engine.generate([[1]], Sampling(temperature=0.2, top_k=3, stop_sequences=("</action>",)))
    asked = [f"answer {length} asleep=False" for length in (2, 1, 1)]
    assert vllm.events == ["weights", "forget", "wake kv_cache", *asked, "sleep 2"]
    assert vllm.enable_sleep_mode and vllm._llm_weights_sleeping and engine.streams
    assert [parameters.seed for parameters in vllm.parameters] == [5, 6, None]
    last = {"logprobs": 0, "seed": None, "output_kind": "final"}
    assert vars(vllm.parameters[-1]) == SENT | {"structured_outputs": {"json": "…"}} | last
    uncached = engine_of(RecordingVLLM(prefix_caching=False)).generate([[1, 2]], Sampling())
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


def test_each_rollout_is_answered_by_the_adapter_of_its_time(vllm_module):
    vllm, versions = RecordingVLLM(), iter("ab")
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
