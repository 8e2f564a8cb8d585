"""What vLLM is asked for when prompts have images, by a vLLM that repeats what it was asked."""

from types import SimpleNamespace

import vision_models
from refusals import refused
from vision_models import drawing

from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.vllm_requests import RequestEngine
from g2po_trl.prompts.images import ImageEncoder
from g2po_trl.utils.images import as_picture

SHOWN = [as_picture(drawing(seed, 24 * seed)) for seed in (1, 2)]


class Repeating:
    """In place of `Requests`."""

    def __init__(self, read):
        self.asked, self.read = {}, read

    def submit(self, key, *request):
        self.asked[key] = request

    def step(self):
        output = SimpleNamespace(token_ids=[5, 1], logprobs=None)
        return {key: SimpleNamespace(outputs=[output], prompt_token_ids=self.read) for key in self.asked}


class Engine(RequestEngine):
    def _parameters(self, sampling, seed):
        return {"seed": seed, **self.to_engine(sampling)}


def test_an_image_is_one_token_and_what_vllm_makes_of_it_is_compared():
    encoder = ImageEncoder(vision_models.FAMILIES["Qwen2.5-VL"]()[0])
    text = f"a {encoder.token}b{encoder.token}"
    ids = encoder.ids([text], SHOWN)
    engine = Engine(encoder.processor.tokenizer, [1], {"logit_bias": {7: 1.0}})
    engine.requests = Repeating(ids)
    assert engine.reads_text_because is not None
    engine.read_images(encoder)
    assert engine.reads_text_because is None and engine.processing_class is encoder.processor
    engine.submit(3, ids, Sampling(), 5, images=SHOWN)
    ((asked, parameters, media),) = engine.requests.asked.values()
    assert asked == encoder.processor.tokenizer(text)["input_ids"]
    assert [image.size for image in media["image"]] == [(24, 16), (48, 16)]
    assert parameters["seed"] == 5
    assert parameters["logit_bias"] == {7: 1.0, **dict.fromkeys(encoder.token_ids, -100.0)}
    assert engine.poll(0)[3].ids == [5, 1]
    engine.requests = Repeating(ids[1:])
    engine.submit(4, ids, Sampling(), images=SHOWN)
    with refused("processing_class"):
        engine.poll(0)
