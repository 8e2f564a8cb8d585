"""Tiny vision-language models with random weights, and their processors.

Image processors are of Pillow alone: torchvision, which Qwen's video processors need, is not installed.
"""

import torch
from causal_models import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, ProcessorMixin
from transformers.processing_utils import ProcessingKwargs

_QWEN_VISION = {"depth": 1, "patch_size": 4, "spatial_patch_size": 4}
_SIGLIP = {"image_size": 28, "patch_size": 7}
_QWEN_PIXELS = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(*special, **named):
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>", *special])
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, extra_special_tokens=named or None)


class QwenProcessorKwargs(ProcessingKwargs, total=False):
    _defaults = {"text_kwargs": {"return_mm_token_type_ids": True}}  # before transformers 5.24


class QwenProcessor(ProcessorMixin):
    valid_processor_kwargs = QwenProcessorKwargs
    return_mm_token_type_ids = True  # since transformers 5.24
    image_token, video_token = "<|image_pad|>", None

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        merged = self.image_processor.merge_size**2
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // merged)


def qwen(kind="qwen2_5_vl"):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    images = Qwen2VLImageProcessorPil(**_QWEN_PIXELS)
    template = _TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    named = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in named.items()}
    vision = _QWEN_VISION if kind == "qwen2_5_vl" else {**_QWEN_VISION, "deepstack_visual_indexes": [0]}
    return QwenProcessor(images, tokenizer, template), kind, {"vision_config": vision, **ids}


def with_videos(processor):
    """Return Qwen2.5-VL's own processor, which can be loaded from a folder and needs torchvision."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    parts = Qwen2VLImageProcessor(**_QWEN_PIXELS), processor.tokenizer, Qwen2VLVideoProcessor(**_QWEN_PIXELS)
    return Qwen2_5_VLProcessor(*parts, chat_template=processor.chat_template)


def gemma3():
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    tokenizer = make_tokenizer(*names.values(), **{f"{name}_token": token for name, token in names.items()})
    size = {"height": 28, "width": 28}
    template = _TEMPLATE.replace("IMAGE", "<start_of_image>")
    processor = Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, template, image_seq_length=4)
    ids = {f"{name}_token_index": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return processor, "gemma3", {"vision_config": _SIGLIP, "mm_tokens_per_image": 4, **ids}


def idefics3(kind="idefics3"):
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = make_tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = Idefics3Processor(images, tokenizer, 4, _TEMPLATE.replace("IMAGE", "<image>"))
    token = tokenizer.convert_tokens_to_ids("<image>")
    return processor, kind, {"vision_config": _SIGLIP, "scale_factor": 2, "image_token_id": token}


FAMILIES = {
    "Qwen2.5-VL": qwen,
    "Qwen3-VL": lambda: qwen("qwen3_vl"),
    "Gemma 3": gemma3,
    "Idefics3": idefics3,
    "SmolVLM": lambda: idefics3("smolvlm"),
}


def build(family, head_dim=16):
    """Return a model and its processor. vLLM on a CPU takes no heads of 16."""
    processor, kind, options = FAMILIES[family]()
    ends = {"eos_token_id": processor.tokenizer.eos_token_id, "pad_token_id": processor.tokenizer.pad_token_id}
    shared = {**ends, "bos_token_id": None, "tie_word_embeddings": True}
    text = {**shared, "head_dim": head_dim, "hidden_size": 4 * head_dim}
    if "Qwen" in family:
        options["vision_config"] = {**options["vision_config"], "out_hidden_size": 4 * head_dim}
        sections = [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    options |= {**shared, "text_config": {**text, "max_position_embeddings": 2048}}
    model = random_model(AutoModelForImageTextToText, kind, 320, **options)
    for name, parameter in model.named_parameters():
        if "projector" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # Gemma's is 0, but what is seen must matter
    return model.eval(), processor


def by_hand(trainer, step, never=()):
    """Log-probabilities of a step's completion by the model's own forward pass of this row alone.

    Pixels are made by the image processor, as TRL makes those of tools' images. `never`: tokens that were not sampled.
    """
    processor, model = trainer.processing_class, trainer.model
    shown = [[image.open() for image in step.shown_images]]
    inputs = processor.image_processor(images=shown, return_tensors="pt")
    taken = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    inputs = {name: inputs[name] for name in taken if name in inputs}
    completion = torch.tensor([step.completion_ids])
    ids = torch.cat([torch.tensor([step.prompt_ids]), completion], 1)
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    if name := types.get(model.config.model_type):
        inputs[name] = torch.isin(ids, torch.tensor(processor.image_token_ids)).long()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
    logits = logits[0, -completion.shape[1] - 1 : -1].float()
    logits[:, list(never)] = -torch.inf
    return logits.log_softmax(-1).gather(1, completion[0, :, None])[:, 0]
