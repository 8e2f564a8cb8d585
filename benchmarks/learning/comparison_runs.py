"""A run of `comparison.py`: trained, evaluated, and kept as one small file."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import machine
from benchmarks.learning.comparison_stages import GAME, START, TAUGHT, Job
from benchmarks.learning.comparison_statistics import first_at
from benchmarks.learning.recipe_runs import ROOT, RecipeRunner, code, lock
from benchmarks.paper import analysis
from g2po_trl import read_jsonl
from g2po_trl.environments.tasks import read_tasks
from g2po_trl.runs.iterations import load_iteration, load_log
from g2po_trl.runs.metrics import summarize
from g2po_trl.utils.json import write_json

PARTS = ("g2po_trl", "envs", "recipes", "benchmarks/credit", "benchmarks/learning/treasure.yaml")
VERSIONS = ("torch", "transformers", "trl", "accelerate", "numpy", "scipy", "alfworld", "textworld")
RELEVANT = ("torch", "transformers", "trl", "alfworld")  # half a run with others is none of either
VLLM = ROOT / ".venv-vllm/bin/python"
# For vLLM's CPU build; several runs at once must not be bound to the same core.
OF_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PHASES = ("rollout", "environment", "generation", "advantage", "critic", "batch", "logps", "update")
CURVES = {
    "success": "episode/success_rate",
    "score": "episode/score",
    "turns": "episode/turns",
    "turns_to_success": "episode/turns_to_success",
    "valid": "episode/valid_action_ratio",
    "admissible": "episode/admissible_action_ratio",
    "group_size": "graph/mean_group_size",
    "singleton_steps": "graph/singleton_step_fraction",
    "value_std_within_node": "graph/value_std_within_node",
    "left_out_fraction": "update/left_out_fraction",
    "advantage": "advantage/abs_mean",
    **{f"advantage_{part}": f"advantage/{part}_abs_mean" for part in ("episode", "node", "edge")},
    **{f"time_{phase}": f"time/{phase}" for phase in PHASES},
    **{name: name for name in ("kl", "entropy", "grad_norm", "learning_rate")},
}
KEPT = ("success_rate", "score", "turns", "turns_to_success", "valid_action_ratio", "admissible_action_ratio")
KEPT += ("error_rate", "success_rate_by_type")
LARGEST, WIDTH, BINS = 20, 0.5, 12  # histograms: visits of a node, deviations of its returns


@dataclass
class Runner(RecipeRunner):
    """Plays jobs.

    Args:
        results, work: folders of small files, and of runs.
        taught: SmolLM2 as taught; None: WORK/taught, made by the first job that needs it.
        vllm: play the episodes of pretrained models with vLLM.
    """

    results: Path
    work: Path
    taught: Path | None = None
    vllm: bool = False

    def play(self, job: Job) -> bool:
        """Play or resume a job and write its file. False: stopped before its end.

        Raises:
            Busy: when another process is at it.
            RuntimeError: when a program failed; names its log.
        """
        commit, trees = code(PARTS)
        if job.pretrained and not self.teach(commit):
            return False
        words, config = list(job.words), config_of(job)
        if self.vllm and job.pretrained and words:
            words += ["--use_vllm", "true"]
        if GAME in " ".join(words):
            self.write_treasure()
        folder = self.work / job.stage / f"{job.name}-{fingerprint(job, words, config, trees)}"
        panels: list[dict[str, Any]] = []
        with lock(folder / "lock") as held:
            for until in job.until or (None,):
                limit = [] if until is None else ["--max_steps", str(until)]
                if words and not self.train(
                    job, folder, [*words, *limit], commit, held, f"train {until or ''}".strip()
                ):
                    return False
                played = self.panels(job, folder, commit, held, until)
                if played is None:
                    return False
                panels.append({"until": until, **played})
                if self.is_over(job, folder, panels[-1]):
                    break
            attempts = json.loads((folder / "attempts.json").read_text())
            write_json(self.file_of(job), self.collected(job, folder, words, config, panels, attempts))
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)  # up to gigabytes, and the run is over
        return True

    def train(self, job: Job, folder: Path, words: Sequence[str], commit: str, held: int, name: str) -> bool:
        """Run the recipe. False: stopped before its end."""
        flags = ["--seed", str(job.seed), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        python = self.python(job)
        return self.call(folder, [python, *self.placed(words), *flags], commit, held, name) is not None

    def panels(self, job: Job, folder: Path, commit: str, held: int, until: int | None) -> dict[str, Any] | None:
        """Play the panels and return them by temperature. `None`: stopped before the end."""
        played = {}
        for temperature, times in job.panels:
            output = folder / "panels" / f"{until or 'end'}-{temperature:g}"
            words = [*self.placed(job.evaluate), "--panel-options", json.dumps({"number": job.games})]
            if not job.evaluate:
                described = json.loads((folder / "run.json").read_text())["evaluation"]["panel_options"]
                words = ["--model", str(folder), "--panel-options", json.dumps(described | {"number": job.games})]
            words += ["--temperature", f"{temperature:g}", "--seeds", str(times), "--output", str(output)]
            words += ["--batch-size", "48" if job.pretrained else "192", "--num-environment-workers", "1"]
            words += ["--engine", "vllm"] if self.vllm and job.pretrained else []
            program = [self.python(job), "-m", "g2po_trl", "evaluate", *words]
            if self.call(folder, program, commit, held, f"panel {output.name}") is None:
                return None
            played[f"{temperature:g}"] = panel_of(output)
        return played

    def is_over(self, job: Job, folder: Path, panel: dict[str, Any]) -> bool:
        """Return whether a run has come to what ends it before its last iteration."""
        if job.reach is not None:
            return first_at(trained(folder)["training"]["success"], job.reach) is not None
        path = next(self.file_of(job).parent.glob(f"{START}-seed*.json"), None)
        if job.gain is None or path is None:
            return False
        before = json.loads(path.read_text())["held_out"][-1]["1"]["success_rate"]
        return float(np.mean(panel["1"]["success_rate"])) >= float(np.mean(before)) + job.gain / 100

    def teach(self, commit: str) -> bool:
        """Make SmolLM2's start if it is not there. False: stopped before its end."""
        if self.taught is not None:
            return True
        folder = self.work / "taught"
        words = [str(ROOT / "recipes/teach_alfworld.py"), "--disable_tqdm", "true", *("--bf16", "false")]
        return (folder / "teaching.json").is_file() or self.run(folder, words, commit) is not None

    def write_treasure(self) -> None:
        """Write the README's program, whose environment is played."""
        (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        (self.work / "treasure.py").write_text(script)

    def placed(self, words: Sequence[str]) -> list[str]:
        """Return words with this machine's paths."""
        places = {TAUGHT: str(self.taught or self.work / "taught"), GAME: str(self.work / "treasure.py")}
        placed = []
        for word in words:
            name, colon, rest = word.partition(":")
            placed.append(places.get(name, name) + colon + rest)
        return placed

    def python(self, job: Job) -> str:
        """Return the interpreter that a job's programs run in."""
        return str(VLLM) if self.vllm and job.pretrained else sys.executable

    def file_of(self, job: Job) -> Path:
        """Return the file of a job's result."""
        return self.results / "runs" / job.stage / f"{job.name}.json"

    def collected(
        self, job: Job, folder: Path, words: list[str], config: str, panels: list[dict], attempts: list[dict]
    ) -> dict[str, Any]:
        """Return what is kept of a complete run."""
        kept = {"stage": job.stage, "arm": job.arm, "seed": job.seed, "command": words or list(job.evaluate)}
        kept |= {"config": config, "commit": attempts[-1]["commit"]}
        if job.pretrained:
            with (Path(self.placed([TAUGHT])[0]) / "model.safetensors").open("rb") as file:
                kept["taught"] = hashlib.file_digest(file, "sha256").hexdigest()
        kept |= {
            "versions": {package: version(package) for package in VERSIONS},
            "machine": machine(),
            **{name: round(sum(a.get(name, 0.0) for a in attempts), 1) for name in ("seconds", "cpu_seconds")},
            "attempts": attempts,
            "held_out": panels,
        }
        if job.evaluate:  # vLLM's environment has other versions
            settings = json.loads(next((folder / "panels").glob("*/settings.json")).read_text())
            kept |= {"engine": settings["engine"], "versions": settings["versions"]}
        return kept | (trained(folder) if words else {})


def config_of(job: Job) -> str:
    """Return a hash of the values of the job's YAML file."""
    if not job.words:
        return ""
    values = yaml.safe_load((ROOT / job.words[job.words.index("--config") + 1]).read_text())
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def fingerprint(job: Job, words: Sequence[str], config: str, trees: str) -> str:
    """Return a hash of all that makes a run another one."""
    about = [words, job.evaluate, job.games, job.panels, config, [version(of) for of in RELEVANT], trees]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]


def panel_of(output: Path) -> dict[str, Any]:
    """Return an evaluation: rates of each play, and who won which game: `1` won, `0` lost, `e` error, by task."""
    rows = sorted(read_tasks(output / "panels" / "panel.jsonl"), key=lambda row: row["task_id"])
    kinds = [row.get("task_type") for row in rows]
    plays, won = [], []
    for path in sorted((output / "trajectories").glob("*.jsonl"), key=lambda p: int(p.stem.rsplit("-", 1)[1])):
        # Of Reflexion's trials of a task the last one counts.
        played = sorted((t for t in read_jsonl(path) if t.info["last_trial"]), key=lambda t: t.task_id)
        plays.append(summarize(played, kinds))
        won.append("".join("1" if t.success else "0" if t.counted else "e" for t in played))
    games = hashlib.sha256("\n".join(row["task_id"] for row in rows).encode()).hexdigest()[:12]
    rates = {name: [rounded(play[name]) for play in plays] for name in KEPT if name in plays[0]}
    return {"games": games, "won": won, **rates}


def trained(folder: Path) -> dict[str, Any]:
    """Return the curves of a run, its own evaluations, and what its graphs look like at first and at last."""
    log = [entry for entry in load_log(folder) if entry.get("episode/success_rate") is not None]
    curves = {name: [rounded(entry.get(metric)) for entry in log] for name, metric in CURVES.items()}
    settings = json.loads((folder / "run.json").read_text())
    own = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    numbers = range(1, len(log) + 1)
    fifth = max(1, len(log) // 5)
    return {
        "iterations": len(log),
        "train_tasks": settings.get("train_manifest"),
        "training": {name: of for name, of in curves.items() if any(value is not None for value in of)},
        "own_evaluations": [{name: entry[name] for name in ("step", "episodes", "success_rate")} for entry in own],
        "graphs": {
            "first": graphs(folder, numbers[:fifth], settings),
            "last": graphs(folder, numbers[-fifth:], settings),
        },
    }


def graphs(folder: Path, numbers: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
    """Return histograms over some iterations: visits of nodes, and deviations of the returns from a node.

    `steps[k]`: steps in nodes visited k + 1 times, in the last entry also more often. `deviations[k]`: nodes with
    unequal returns whose sample deviation is in [k, k + 1) x 0.5 units of reward, in the last entry also larger.
    `revisited`: nodes visited twice or more.
    """
    steps, deviations, revisited = np.zeros(LARGEST, int), np.zeros(BINS, int), 0
    for number in numbers:
        graph = load_iteration(folder, number).graph(settings["trainer"]["gamma"])
        visits = analysis.group_sizes(graph)["sizes"]
        steps += np.bincount(np.minimum(visits, LARGEST) - 1, visits, minlength=LARGEST).astype(int)
        found = analysis.value_variation(graph)["deviations"]
        deviations += np.bincount(np.minimum(found // WIDTH, BINS - 1).astype(int), minlength=BINS)
        revisited += int(np.sum(visits > 1))
    return {"steps": steps.tolist(), "deviations": deviations.tolist(), "revisited": revisited}


def rounded(value: Any) -> Any:
    """Return numbers, also in dictionaries, with five digits; None for nan."""
    if isinstance(value, dict):
        return {name: rounded(of) for name, of in value.items()}
    return None if value is None or np.isnan(value) else float(f"{value:.5g}")
