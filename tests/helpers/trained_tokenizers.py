"""Tokenizers of several kinds, trained on two lines."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Your task is to: put a mug in cabinet 12.\n\nYou see: a desk 1, a drawer 2.\nActions:\ngo to desk 1\nlook\n",
    "'You're at shelf 3', it said. See http://a.b/c and\n/home/x.\n  in\n\n- item (one) [two] <three> §4 — café\n",
] * 5


def words_of(expression=None, prefix_space=False):
    """Pre-tokenizers of bytes, GPT-2's expression without one of their own."""
    if expression is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(pre_tokenizer, normalizer=None, added=()):
    tokenizer = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
