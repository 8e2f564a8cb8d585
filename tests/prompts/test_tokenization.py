"""Token ids are the tokenizer's own, for every kind of tokenizer."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_actors import ScriptedEngine
from tokenizers import AddedToken, normalizers, pre_tokenizers
from toy_environments import Countdown
from trained_tokenizers import trained, words_of
from transformers import AutoTokenizer

from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import EnvironmentPool, PromptTemplate
from g2po_trl.engines.base import Completion
from g2po_trl.prompts.template import parse_plain
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {
    "qwen": lambda: AutoTokenizer.from_pretrained(str(tiny_model_path())),  # with tokens such as " 1" added
    "gpt2": lambda: trained(words_of()),
    "llama3": lambda: trained(words_of(LLAMA3)),
    "o200k": lambda: trained(words_of(O200K), normalizers.NFC()),
    "sentencepiece": lambda: trained(None, normalizers.Replace(" ", "▁")),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace()),
    "spaces split from words": lambda: trained(pre_tokenizers.Split(" ", "merged_with_previous")),
    "prefix space": lambda: trained(words_of(prefix_space=True)),
    "takes the newline before it": lambda: trained(words_of(), added=[AddedToken("<mask>", lstrip=True)]),
    "takes the space behind it": lambda: trained(words_of(), added=[AddedToken("<end>", rstrip=True)]),
    "a token of two words": lambda: trained(words_of(), added=["drawer 2"]),
    "a token that ends with a space": lambda: trained(words_of(), added=["INST "]),
}


@functools.cache
def encoder_of(name):
    return ChatEncoder(KINDS[name]())


PIECES = st.sampled_from(
    [" ", "  ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\u00a0", "\u2028", "\u3000", "\u200b", "\x00"]
    + [
        "a",
        "Z",
        "go",
        " to",
        "1",
        "12",
        " 7",
        "'s",
        "'",
        '"',
        ".",
        ".\n",
        ":",
        "/",
        "-",
        "[",
        "§",
        "é",
        "e\u0301",
        "中",
        "😀",
    ]
    + ["<|im_end|>", "<|im_start|>", "<think>", "<mask>", "<end>", "drawer 2", "INST "]
)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=12), max_size=3))
def test_ids_of_texts_together_are_those_of_each_alone(name, texts):
    encoder = encoder_of(name)
    assert encoder.ids(texts) == [encoder.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_no_texts_have_no_ids():
    assert encoder_of("gpt2").ids([]) == []


TEMPLATE = PromptTemplate(
    first="{task}\n{observation}", later="{task}\n{history}\n{observation}", parse_completion=parse_plain
)


def test_a_prompt_is_built_only_for_an_episode_that_is_asked():
    """Three turns of four episodes, and none after the last."""
    encoder, made = ChatEncoder(KINDS["qwen"]()), []

    def ids(texts):
        made.append(len(texts))
        return ChatEncoder.ids(encoder, texts)

    encoder.ids = ids
    with EnvironmentPool(Countdown, num_workers=2) as pool:
        engine = ScriptedEngine(
            encoder.tokenizer,
            lambda prompts: [Completion(encoder.tokenizer("go<|im_end|>")["input_ids"]) for _ in prompts],
        )
        player = Player(pool, PromptActor(engine, encoder, TEMPLATE), max_turns=3)
        trajectories, stats = player.play([{"turns": 9}] * 4, groups=[0] * 4)
    assert [len(t.steps) for t in trajectories] == [3] * 4
    assert made == [4, 4, 4]
    assert stats.prompt_tokens == sum(len(s.prompt_ids) for t in trajectories for s in t.steps)
