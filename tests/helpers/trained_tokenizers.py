"""Tokenizers of several kinds, trained on two lines."""

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Your task is to: put a mug in cabinet 12.\n\nYou see: a desk 1, a drawer 2.\nActions:\ngo to desk 1\nlook\n",
    "'You're at shelf 3', it said. See http://a.b/c and\n/home/x.\n  in\n\n- item (one) [two] <three> §4 — café\n",
] * 5


def words_of(prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)


def trained(pre_tokenizer, normalizer=None, added=(), corpus=CORPUS, size=600, first=(), **named):
    """A tokenizer of so many tokens, of which the `first` are special; `named`: `eos_token` and the like."""
    tokenizer = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    special = {"special_tokens": list(first), "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=size, show_progress=False, **special))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
