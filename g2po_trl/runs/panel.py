"""What a run says of itself: evaluations on a fixed panel of tasks, and the model card made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from trl.trainer.utils import get_config_model_id

from ..environments.tasks import tasks_hash
from ..json_text import to_json, write_json
from ..rollout.sampling import Sampling, derived_seed
from ..trajectory import Trajectory, write_jsonl
from .evaluation import summarize
from .model_card import build_model_card, describe_adapter
from .persistence import PersistentTrainer
from .run_description import FILE, describe_run


class PanelTrainer(PersistentTrainer):
    """A trainer that plays panels; how it plays, `pool`, `estimator_name` and `card_facts` are the subclass's."""

    evaluations: list[dict[str, Any]]
    # What a recipe adds to run.json.
    run_settings: Mapping[str, Any] = MappingProxyType({})

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Play the panel at `eval_temperature`, every row `num_generations_eval` times, from `eval_seed`.

        Returns:
            `eval_success_rate`, `eval_success_rate/<task_type>`, `eval_reward`, `eval_turns`, …; also appended to
            output_dir/evaluations.jsonl, the trajectories written beside it.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if isinstance(dataset, dict):
            return {
                key: value
                for name, part in dataset.items()
                for key, value in self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}").items()
            }
        if dataset is None or len(dataset) == 0:
            raise ValueError("eval_dataset is empty: pass the panel of tasks to evaluate on")
        started = time.perf_counter()
        trajectories, rows = self._play_panel([dict(row) for row in dataset for _ in range(self.num_generations_eval)])
        summary = summarize(trajectories, [row.get("task_type") for row in rows])
        if self.accelerator.is_main_process:
            self._write_evaluation(metric_key_prefix, summary, trajectories, rows)
        by_type = summary["success_rate_by_type"]
        numbers = {name: value for name, value in summary.items() if not isinstance(value, dict)}
        metrics = {f"{metric_key_prefix}_{name}": float(value) for name, value in numbers.items()}
        metrics |= {f"{metric_key_prefix}_success_rate/{kind}": value for kind, value in by_type.items()}
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - started
        self._log_evaluation(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log an evaluation alone. In training mode TRL would add the iteration's metrics, and forget them."""
        training = self.model.training
        self.model.eval()
        self.log({name: value for name, value in metrics.items() if not math.isnan(value)})
        self.model.train(training)

    def _play_panel(self, rows: list[dict[str, Any]]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """All ranks' episodes of the panel, `per_device_eval_batch_size` at a time on each."""
        rank, num_ranks = self.accelerator.process_index, self.accelerator.num_processes
        size = self.args.per_device_eval_batch_size
        local = rows[rank::num_ranks]
        chunks = math.ceil(math.ceil(len(rows) / num_ranks) / size)  # as many on every rank
        played: list[Trajectory] = []
        training = self.model.training
        self.model.eval()
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        sampling = Sampling.for_evaluation(self.args)
        seeds = [derived_seed(self.args.eval_seed, number) for number in range(len(rows))][rank::num_ranks]
        with torch.random.fork_rng(devices=devices), self.policy_in_engine():
            torch.manual_seed(self.args.eval_seed + rank)  # for engines that take no seeds
            for chunk in range(chunks):
                part = slice(chunk * size, (chunk + 1) * size)
                played += self.play(local[part], sampling, description="evaluation", seeds=seeds[part])[0]
        self.model.train(training)
        pairs = gather_object(list(zip(played, local)))
        return [trajectory for trajectory, _ in pairs], [row for _, row in pairs]

    def _write_evaluation(self, prefix: str, summary: dict, trajectories: list[Trajectory], rows: list[dict]) -> None:
        step, temperature = self.state.global_step, self.args.eval_temperature
        entry = {"name": prefix, "step": step, "panel": tasks_hash(rows), "temperature": temperature, **summary}
        self.evaluations.append(entry)
        self.write_evaluations()
        if self.args.save_trajectories:
            write_jsonl(Path(self.args.output_dir, "trajectories", f"{prefix}-{step:06d}.jsonl"), trajectories)

    def write_evaluations(self) -> None:
        """The file holds this run's evaluations and no others: not those a killed run made after its checkpoint."""
        path = Path(self.args.output_dir, "evaluations.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(to_json(entry) + "\n" for entry in self.evaluations), encoding="utf-8")

    def write_run(self) -> None:
        """output_dir/run.json, see `run_description`, and the panels' rows."""
        folder = Path(self.args.output_dir)
        write_json(folder / FILE, {**describe_run(self), **self.run_settings}, indent=2)
        panels = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in panels.items():
            if dataset is not None:
                path = folder / "panels" / f"{name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(to_json(dict(row)) + "\n" for row in dataset), encoding="utf-8")

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Write output_dir/README.md: what was trained on what, success before and after, settings, versions."""
        if not self.is_world_process_zero():
            return
        tasks = self.train_dataset
        facts = {"Training tasks": f"{len(tasks)} (`{tasks_hash(tasks)}`)", **self.card_facts}
        if is_peft_model(self.model):
            facts |= {f"Adapter `{name}`": describe_adapter(config) for name, config in self.model.peft_config.items()}
        card = build_model_card(
            self.args,
            base_model=get_config_model_id(self.model.config),
            environment=self.pool.name,
            facts=facts,
            is_adapter=is_peft_model(self.model),
            estimator=self.estimator_name,
            optimizer_steps=self.state.global_step,
            evaluations=self.evaluations,
            tags=[*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
            model_name=model_name,
            dataset_name=dataset_name,
            repo_id=self.hub_model_id,
            architecture=(self.model.config.architectures or [None])[0],
        )
        card.save(Path(self.args.output_dir) / "README.md")
