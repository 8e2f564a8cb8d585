"""The model card: training, results, and how to use the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData

from ..utils.trl_compat import get_config_model_id
from .run_json import installed_versions
from .summary import before_and_after_by_panel, format_table, is_reported

_TEMPLATE = """# {name}

{base}, trained as an agent in {environment} with g2po-trl, a [TRL](https://github.com/huggingface/trl) trainer for
G2PO ([Group-Graph Policy Optimization](https://arxiv.org/abs/2606.22995)).
Advantages: `{estimator}`; optimizer steps: {steps}.

## Results

{results}

## Data

| | |
|---|---|
{facts}

## Use

```python
from g2po_trl import load_agent

agent = load_agent("{where}")
action = agent.act("the first observation")  # with the prompts and settings of training
```

`g2po evaluate --model {where}` plays its environment, and `g2po view` shows its prompts and completions.

## Settings that differ from the defaults

| field | value |
|---|---|
{settings}

Versions: {versions}.
"""


def card_of(trainer: Any, tags: Sequence[str], model_name: str | None, dataset_name: str | None) -> ModelCard:
    """Return the model card of a `G2POTrainer`, whose base model is linked unless it is a path."""
    args, model = trainer.args, trainer.model
    base = get_config_model_id(model.config) or "?"
    on_hub = base != "?" and not Path(base).exists()
    where = trainer.hub_model_id or args.hub_model_id or args.output_dir
    name = model_name or Path(args.output_dir).name
    facts = {"Training tasks": f"{len(trainer.train_dataset)} (`{trainer.tasks_hash}`)", **trainer.card_facts}
    if is_adapter := is_peft_model(model):
        adapter = model.active_peft_config
        parts = {"rank": getattr(adapter, "r", None), "alpha": getattr(adapter, "lora_alpha", None)}
        shown = [f"{name} {value}" for name, value in parts.items() if value is not None]
        facts["Adapter"] = ", ".join([getattr(adapter.peft_type, "value", adapter.peft_type), *shown])
    defaults, resumable = {one.name: one.default for one in fields(args)}, args.fields_with("resumable")
    changed = {name: value for name, value in args.to_dict().items() if value != defaults.get(name)}
    settings = {name: value for name, value in changed.items() if value and name not in resumable}
    results = results_of(trainer.folder.evaluations, args.load_best_model_at_end)
    content = _TEMPLATE.format(
        name=name,
        base=f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{Path(base).name}`",
        environment=f"`{trainer.player.pool.name}`" + (f" ({dataset_name})" if dataset_name else ""),
        estimator=trainer.estimator_name,
        steps=trainer.state.global_step + trainer.iteration.inner_steps,
        results=f"{results}\n\n{trainer.verdict.text or ''}".rstrip(),
        facts=table_of(facts),
        where=where,
        settings=table_of(settings),
        versions=", ".join(f"{name} {number}" for name, number in installed_versions().items()),
    )
    library = "peft" if is_adapter else "transformers"
    data = ModelCardData(base_model=base if on_hub else None, library_name=library, model_name=name, tags=list(tags))
    return ModelCard(f"---\n{data}\n---\n\n{content}")


def table_of(values: Mapping[str, Any]) -> str:
    """Return the rows of a table."""
    return "\n".join("| {} | {} |".format(name, str(value).replace("|", "\\|")) for name, value in values.items())


def results_of(evaluations: Sequence[dict[str, Any]], best_was_chosen: bool) -> str:
    """Return tables of the first and the last evaluation, oldest first, of each panel or of the panel "report"."""
    tables = []
    for panel, (before, after) in before_and_after_by_panel(evaluations).items():
        where = "on another evaluation set" if is_reported(panel) else "here, so success is too high on average"
        chosen = f" The checkpoint was chosen {where}." if best_was_chosen else ""
        columns = {"before": before, "after": after} if before is not after else {f"step {after['step']}": after}
        tasks = f"a fixed evaluation set (`{panel}`, tasks `{after['panel']}`), temperature {after['temperature']}"
        tables.append(f"{after['episodes']} episodes of {tasks}.{chosen}\n\n```text\n{format_table(columns)}\n```")
    return "\n\n".join(tables) or "This run made no evaluation."
