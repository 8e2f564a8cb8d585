"""Write what a tiny model that sees is taught from. It needs Pillow.

    python -m g2po_envs.sokoban.make_tiny_vision_model --output START

The folder START gets an untrained vision-language model (Idefics3) with its processor, and tasks.jsonl. Then

    g2po teach g2po_envs.sokoban.tiny:drawn_environment --config sokoban-images --model START --tasks START/tasks.jsonl

The model reads a square of the picture as one token. It is taught to say where everything is before it moves
(`describing_expert`): from its moves alone it does not learn to look (benchmarks/results/tiny_models/README.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from g2po_envs.sokoban.drawing import SQUARE
from g2po_envs.sokoban.games import SIZES, level_rows
from g2po_envs.sokoban.make_tiny_model import FIRST_LEVEL, make_tokenizer
from g2po_envs.tiny.tokenizer import SPECIAL
from g2po_trl.utils.json import write_json_lines

SIZE = "small"
SIDE = SIZES[SIZE].side  # squares; the model has learned a place for each
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_processor() -> Idefics3Processor:
    """Return a processor that takes a picture of a level as it is, with a token for each square."""
    tokenizer = make_tokenizer()
    tokens = [*SPECIAL[1:2], IMAGE, "<fake_token_around_image>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = None  # the processor's is used
    edge = {"longest_edge": SIDE * SQUARE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_resize=False, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=SIDE**2, chat_template=CHAT_TEMPLATE)


def build_model(tokenizer: PreTrainedTokenizerBase) -> Idefics3ForConditionalGeneration:
    """Return a model with random weights.

    They are larger than transformers', which in a model of this width attends to all alike for long.
    """
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = LlamaConfig(
        **SHAPE,
        **ends,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        bos_token_id=None,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    config = Idefics3Config(
        vision_config={**SHAPE, "image_size": SIDE * SQUARE, "patch_size": SQUARE},
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=1,  # a token for each square
        tie_word_embeddings=True,
        **ends,
    )
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "position_embedding" in name:
                weight.normal_()
            elif weight.ndim > 1 and "embed_tokens" not in name:
                weight.normal_(std=weight[0].numel() ** -0.5)
    for name, number in ends.items():
        setattr(model.generation_config, name, number)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model, its processor and the tasks")
    parser.add_argument("--levels", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    processor = make_processor()
    build_model(processor.tokenizer).save_pretrained(args.output)
    processor.save_pretrained(args.output)
    write_json_lines(args.output / "tasks.jsonl", level_rows(SIZE, args.levels, first=FIRST_LEVEL))


if __name__ == "__main__":
    main()
