"""The reward of a purchase: the share of the requested properties that it has.

score = r_type (attributes met + options met + [price within the limit]) / (attributes + options requested + 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thefuzz import fuzz

from .catalogue import Product
from .goals import Goal

SIMILAR = 85  # of 100, token_set_ratio of thefuzz: above, two words mean the same
# Colours that stand for all their shades; the first that is part of a value counts. From WebShop's normalize.py.
COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow"
).split()


def score(
    product: Product,
    goal: Goal,
    price: float,
    options: Mapping[str, str],
    nouns: Callable[[str], Sequence[str]],
    corrected: bool = False,
) -> tuple[float, dict]:
    """Return the reward of buying a product, and its parts.

    Args:
        product: the product.
        price: its price.
        goal: the goal.
        options: chosen options, group -> value.
        nouns: title -> its nouns, in lower case and in order.
        corrected: compare the options of a synthetic goal by their values, like those of human goals. Officially, a
            chosen value is compared with the pair (group, value), which does not always recognise the requested one,
            so that some goals cannot be reached.

    Returns:
        The score in [0, 1]; and `r_type`, `r_att`, `r_option` and `w_option` (if options were requested), `r_price`,
        the weights `w_att` and `w_price`, `query_match`, `category_match`, `title_score`.
    """
    kind = _kind(product, goal, nouns)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    wanted = _wanted_options(goal, corrected)
    matched = _options_matched(list(options.values()), wanted)
    in_price = price <= goal.price_upper
    total = len(goal.attributes) + len(wanted) + 1
    parts = {
        **kind,
        "r_att": attributes / len(goal.attributes),
        "w_att": len(goal.attributes) / total,
        "r_price": in_price,
        "w_price": 1 / total,
    }
    if wanted:
        parts |= {"r_option": matched / len(wanted), "w_option": len(wanted) / total}
    return (attributes + matched + in_price) / total * kind["r_type"], parts


def _kind(product: Product, goal: Goal, nouns: Callable[[str], Sequence[str]]) -> dict:
    """Compare the product's kind with the goal's, by query, category and the nouns of the titles."""
    query_match = product.query == goal.query
    levels, goal_levels = ({level.strip() for level in p.product_category.split("›")} for p in (product, goal))
    category_match = len(levels & goal_levels) >= 2
    wanted = nouns(goal.title)
    title_score = len(set(nouns(product.title)) & set(wanted)) / len(wanted) if len(wanted) else 0.2
    if title_score == 0:
        r_type = 0.0
    elif title_score < 0.1:
        r_type = 0.1
    else:
        r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(fuzz.token_set_ratio(own, attribute) > SIMILAR for own in product.attributes):
        return True
    return any(attribute in text.lower() for text in (product.title, " ".join(product.bullets), product.description))


def _wanted_options(goal: Goal, corrected: bool) -> list[str]:
    """Return the text with which each requested option is compared.

    A synthetic goal's pair (group, value) is compared as a whole, as in the official engine, unless one of the two is
    a colour.
    """
    if isinstance(goal.options, Mapping):
        if corrected:
            return [_colour(value) for value in goal.options.values()]
        return [
            next((colour for colour in COLOURS if colour in pair), None) or str(pair) for pair in goal.options.items()
        ]
    return [_colour(value) for value in goal.options]


def _options_matched(chosen: list[str], wanted: list[str]) -> int:
    chosen = [_colour(value) for value in chosen]
    return sum(any(fuzz.token_set_ratio(own, one) > SIMILAR for own in chosen) for one in wanted)


def _colour(value: str) -> str:
    return next((colour for colour in COLOURS if colour in value), value)
