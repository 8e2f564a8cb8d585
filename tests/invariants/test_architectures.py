"""Every model family: layouts give the log-probabilities and gradient of rows of their own, or are not taken.

What few families cover runs by default; all of them by `make test-slow`, and `python docs/make_architectures.py`
writes what is found.
"""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, LAYOUTS, WINDOW, alone, errors, in_layout, samples
from letter_environment import LongLetterEnvironment
from packaging.version import Version
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from g2po_trl.update import attention, packing
from g2po_trl.update.attention import why_padded
from g2po_trl.update.policy.probe import why_not_forked

# Between them: a mask for all layers, by layer, chunks, absolute positions, no positions, convolutions, a recurrence.
FAST = ("Mistral with a window", "Gemma-3", "Llama 4", "GPT-2", "Bloom", "LFM2", "Granite 4, hybrid")
WITHOUT_LORA = dict.fromkeys(("Granite 4, hybrid", "Falcon-H1", "Nemotron-H", "Mamba-2"), ["out_proj"])
WITHOUT_LORA |= dict.fromkeys(("Llama 4", "Phi-3.5 MoE"), ["router"])
NOT_BY_POSITIONS = ["Qwen2.5-VL", "Llama 4", "GPT-OSS", "OPT"]  # with SDPA or eager attention
NOT_BY_POSITIONS += ["Falcon"] if Version(transformers.__version__) < Version("5.24") else []
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
    assert (why_padded(model) is None) == (family.layout == "shared")
    assert family.layout == "shared" or why_not_forked(model) is None


@by_family([name for name, family in FAMILIES.items() if family.layout == "shared"], FAST[:2])
def test_sequences_of_one_row_are_told_apart_by_positions(name, monkeypatch):
    """As flash attention does with the same inputs, which needs a GPU; here transformers makes masks from them.

    Where it does not, a run finds out by number, and pads.
    """
    monkeypatch.setattr(packing, "takes_packed", lambda implementation: True)
    model, (sequences, scored) = FAMILIES[name].build(), samples()
    with torch.no_grad():
        wanted = alone(model, sequences, scored)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        shapes = []
        model.base_model.register_forward_pre_hook(
            lambda module, arguments, named: shapes.append((named["input_ids"].shape[0], named["attention_mask"])),
            with_kwargs=True,
        )
        found = in_layout(model, sequences, scored, "packed")
    assert shapes == [(1, None)]
    assert ((found - wanted).abs().max() < EXACT) == (name not in NOT_BY_POSITIONS)


def test_a_window_left_out_would_be_seen_here(monkeypatch):
    """The samples are long enough to tell: with the mask of a model without windows they are nats off."""
    monkeypatch.setattr(attention, "reaches", lambda config: attention.Reach())
    (nats, _) = errors(FAMILIES["Mistral with a window"], ("shared",))["shared"]
    assert nats > 0.1


@pytest.fixture
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def family_folder(tmp_path, tokenizer):
    """Writes a family's model, with the tests' tokenizer, and gives its folder."""

    def write(name):
        folder = tmp_path / "model"
        FAMILIES[name].build().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return write


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def moved(trainer, before):
    return [name for name, weight in trained(trainer).items() if not torch.equal(weight, before[name])]


@pytest.mark.slow
@by_family(fast=())
def test_a_training_step_moves_the_weights(name, make_trainer, family_folder, tokenizer, caplog):
    trainer = make_trainer(
        LongLetterEnvironment,
        model=family_folder(name),
        processing_class=tokenizer,
        max_completion_length=4,
        max_steps=1,
        router_aux_loss_coef=0.0,
    )
    before = trained(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.update.layout.kind == FAMILIES[name].layout
    assert len(moved(trainer, before)) > len(before) / 3  # experts that no token chose, vision: they stay
    assert all(torch.isfinite(weight).all() for weight in trained(trainer).values())


@pytest.mark.slow
@by_family(fast=())
def test_lora_on_all_linear_layers_trains_and_merges(name, make_trainer, family_folder, tokenizer):
    # PEFT refuses dropout for experts, and the last projection of Mamba layers; it cannot wrap a linear layer that
    # gives a tuple.
    peft_config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=WITHOUT_LORA.get(name))
    trainer = make_trainer(
        LongLetterEnvironment,
        model=family_folder(name),
        processing_class=tokenizer,
        peft_config=peft_config,
        router_aux_loss_coef=0.0,
        max_completion_length=4,
        max_steps=1,
        learning_rate=1e-2,
    )
    before = trained(trainer)
    trainer.train()
    assert trainer.update.layout.kind == FAMILIES[name].layout
    assert moved(trainer, before)
    model = trainer.model.eval()
    ids = torch.arange(3, 3 + 3 * WINDOW)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        merged = model.merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert (merged - wanted).abs().max() < 1e-3


def families() -> str:
    """Markdown: families by layout taken, why, and how exact layouts are."""
    shared, forked, largest = [], {}, (0.0, 0.0)
    for name, family in FAMILIES.items():
        found = errors(family, LAYOUTS[family.layout])
        largest = [max(values) for values in zip(largest, *found.values())]
        of = shared if family.layout == "shared" else forked.setdefault(why_padded(family.build()), [])
        of.append(entry(name))
    nats, of_gradient = largest
    exact = f"Largest differences between layouts: {nats:.0e} nats, and {of_gradient:.0e} of the gradient's norm."
    because = [f"- **`forked`**, because {reason}: {', '.join(names)}." for reason, names in forked.items()]
    return "\n".join([f"- **`shared`**: {', '.join(shared)}.", *because, "", exact])


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
