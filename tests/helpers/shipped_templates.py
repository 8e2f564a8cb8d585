"""The chat templates that TRL ships, each with a small tokenizer that has its special tokens."""

import re
from pathlib import Path

import trl
from tokenizers import decoders
from tools_by_hand import Safe
from trained_tokenizers import trained, words_of
from transformers.utils import get_json_schema

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "training" not in path.stem)
# The tokens that end an assistant's message; the first one that a template has is the tokenizer's.
ENDS = [
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|end|>", "<|endoftext|>", "<|user|>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "</s>", "<end_of_utterance>", "<|eot|>"),
]
_SPECIAL = r"<\|[^>\s'\"{}]*\|>|<[a-z_]+\|>|<\|[a-z_]+>|<｜[^>]*｜>|<(?:start|end)_of_turn>|<end_of_utterance>|</?s>"
TOOLS = [get_json_schema(Safe().turn)]
TASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open the safe."}]
CALL = {"type": "function", "function": {"name": "turn", "arguments": {"digit": 7}}}
# Templates that cannot render a conversation of text from which the next prompt follows token by token.
NOT_AFTER_TEXT = {"gptoss", "phi3", "phi3_5"}
# Templates that render calls and results of tools, and whose calls TRL can read.
NATIVE = {
    *("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "gptoss", "llama3_1", "llama3_2"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "nemotron_3_5_lightning", "nemotron_3_nano"),
    *("nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    *("qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
}


def tokenizer_of(name):
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = sorted(set(re.findall(_SPECIAL, text)))
    tokenizer = trained(words_of())
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template, tokenizer.bos_token = text, "<|im_start|>"
    if name.startswith(("gemma", "diffusion_gemma", "glm4moe")):  # turns end with another token than the tokenizer's
        tokenizer.add_special_tokens({"eos_token": "<eos>"})
    else:
        tokenizer.eos_token = next((end for end in ENDS if end in special), "<|im_end|>")
    return tokenizer


def stop_ids(tokenizer):
    """Return the tokens that end a completion, as a model's generation configuration has them."""
    known = tokenizer.get_vocab()
    return [known[end] for end in ENDS if end in known and end in tokenizer.chat_template]
