"""Every model family: layouts give the log-probabilities and gradient of rows of their own, or are not taken.

What few families cover runs by default; all of them by `make test-slow`, and `python docs/make_architectures.py`
writes what is found.
"""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, LAYOUTS, WINDOW, errors
from peft import LoraConfig

from g2po_trl.update.attention import why_not_by_branches
from g2po_trl.update.policy.probe import why_not_forked

# Between them: a window of all layers, of some, sinks, absolute positions, no positions, convolutions, a recurrence.
FAST = ("Mistral with a window", "GPT-OSS", "GPT-2", "Bloom", "LFM2", "Granite 4, hybrid")
WITHOUT_LORA = dict.fromkeys(("Granite 4, hybrid", "Falcon-H1", "Nemotron-H", "Mamba-2"), ["out_proj"])
WITHOUT_LORA |= dict.fromkeys(("Llama 4", "Phi-3.5 MoE"), ["router"])
EXACT = 1e-4  # nats, and of the gradient's length
MARK = "<!-- families -->\n"


def by_family(names=FAMILIES, fast=FAST):
    marks = {name: () if name in fast else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@by_family()
def test_layouts_are_exact_below_at_and_beyond_the_window(name):
    family = FAMILIES[name]
    for layout, (nats, by_gradient) in errors(family, LAYOUTS[family.layout]).items():
        assert nats < EXACT and by_gradient < EXACT, layout


@by_family()
def test_the_configuration_tells_the_layout(name):
    family, model = FAMILIES[name], FAMILIES[name].build()
    assert (why_not_by_branches(model) is None) == (family.layout != "forked")
    assert family.layout != "forked" or why_not_forked(model) is None


@pytest.mark.slow
@by_family(fast=())
def test_lora_on_all_linear_layers_trains_and_merges(name, make_family_trainer):
    # PEFT refuses dropout for experts, and the last projection of Mamba layers; it cannot wrap a linear layer that
    # gives a tuple.
    peft_config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=WITHOUT_LORA.get(name))
    options = {"router_aux_loss_coef": 0.0, "max_steps": 1, "learning_rate": 1e-2}
    trainer = make_family_trainer(name, peft_config=peft_config, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert trainer.update.layout.kind == FAMILIES[name].layout
    after = dict(trainer.model.named_parameters())
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())
    assert all(torch.isfinite(after[name]).all() for name in before)
    model = trainer.model.eval()
    ids = torch.arange(3, 3 + 3 * WINDOW)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        merged = model.merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert (merged - wanted).abs().max() < 1e-3


def families() -> str:
    """Markdown: families by layout taken, why, and how exact layouts are."""
    groups, largest = {"**`shared`**": []}, (0.0, 0.0)
    for name, family in FAMILIES.items():
        found = errors(family, LAYOUTS[family.layout])
        largest = [max(values) for values in zip(largest, *found.values())]
        reason = {"shared": "", "forked": f", because {why_not_by_branches(family.build())}"}
        reason["padded"] = ", because branches are not exact, which a run finds by number"
        groups.setdefault(f"**`{family.layout}`**{reason[family.layout]}", []).append(entry(name))
    nats, of_gradient = largest
    exact = f"Largest differences between layouts: {nats:.0e} nats, and {of_gradient:.0e} of the gradient's norm."
    return "\n".join([*(f"- {group}: {', '.join(names)}." for group, names in groups.items()), "", exact])


def entry(name: str) -> str:
    return f"{name} (`{FAMILIES[name].model_type}`)"


def test_the_docs_have_every_family_at_its_layout():
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    lines = dict.fromkeys(LAYOUTS, "")
    for line in text.partition(MARK)[2].splitlines():
        for layout in lines:
            lines[layout] += line if line.startswith(f"- **`{layout}`**") else ""
    missing = [name for name, family in FAMILIES.items() if entry(name) not in lines[family.layout]]
    assert not missing, "python docs/make_architectures.py"
