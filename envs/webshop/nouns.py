"""The nouns of a product's title, which distinguish kinds of products in the score.

The official engine uses spaCy's `en_core_web_sm`, which no package registry has. `textblob_nouns` needs no download;
`spacy_nouns` needs that model. Both return nouns and proper nouns in lower case, in order, with repetitions.
"""

from __future__ import annotations

from functools import cache, lru_cache


@lru_cache(maxsize=1 << 16)
def textblob_nouns(title: str) -> tuple[str, ...]:
    """Return the nouns found by TextBlob's pattern tagger, whose lexicon comes with the package."""
    return tuple(word.lower() for word, tag in _pattern_tagger().tag(title) if tag.startswith("NN"))


@lru_cache(maxsize=1 << 16)
def spacy_nouns(title: str) -> tuple[str, ...]:
    """Return the nouns found by spaCy's `en_core_web_sm`, as in the official engine.

    Raises:
        OSError: if the model is not installed.
    """
    return tuple(token.text.lower() for token in _spacy_model()(title) if token.pos_ in ("NOUN", "PROPN"))


@cache
def _pattern_tagger():
    from textblob.en.taggers import PatternTagger

    return PatternTagger()


@cache
def _spacy_model():
    import spacy

    return spacy.load("en_core_web_sm")


NOUNS = {"textblob": textblob_nouns, "spacy": spacy_nouns}
