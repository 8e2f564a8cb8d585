"""How noisy is the policy gradient, and where does it point, by method, λ and key? Needs no training.

    python -m benchmarks.credit.gradient_noise start --groups 128
    python -m benchmarks.credit.gradient_noise middle --model RUN/checkpoint-15   # any name, any checkpoint
    python -m benchmarks.credit.gradient_noise long --setting long --groups 48
    python -m benchmarks.credit.gradient_noise --report

A fixed policy plays groups of 8 on generated ALFWorld games that no run trains on. Every method's advantages are then
computed from the same episodes, and with them its gradient (on-policy, no KL term), one vector a group: the sum over
steps of advantage times gradient of the completion's log-probability, so each step passes through the model once,
however many methods there are. With g a group's gradient, m = E g and an iteration of 8 groups (64 episodes):

    signal     |m|² / E |mean of 8 g - m|²: signal to noise of an iteration's gradient
    halves     cosine of the mean gradients of two random halves of all groups
    direction  cosine of m with the expected gradient of the mean reward
    step       expected cosine of an iteration's gradient with that: both at once

"halves" and "signal" tell noise alone: a constant would be perfect. The expected gradient of the mean reward is that
of an estimator without bias, `rloo by state`: R - mean R of the group's other episodes at the same state (of all the
others if none was there). |m|² and inner products are means over pairs of different groups, so noise does not enter; a
"direction" may then exceed 1. Intervals: 95 %, bootstrap over groups, the same draws for all methods. The table has no
"direction" and "step" where the signal of that estimator is not told apart from 0.

"adam" is all of it with coordinates divided by the fourth root of the reference's mean square, so that inner products
are those of a step that Adam takes.

Goes on where it was interrupted (WORK). Writes RESULTS/NAME.json with each group's numbers and RESULTS/table.md.
Inner products of all groups stay in WORK, so that NAME.json, once deleted, is made again in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml
from datasets import Dataset

from benchmarks.common import ROOT, facts
from benchmarks.credit.gradient_noise_statistics import DISCOUNTED, ITERATION, REFERENCE, advantages, analyse, table
from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_environment, tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, Trajectory, read_jsonl, write_jsonl
from g2po_trl.utils.json import write_json

CONFIGS = {"short": "recipes/alfworld/tiny.yaml", "long": "recipes/alfworld/tiny-long.yaml"}
GROUP, GAME_SEED = 8, 1  # episodes; recipes train on games of seed 0


# -- gradients ---------------------------------------------------------------------------------------------------


def replayed(trajectory: Trajectory, environment: AlfworldEnvironment) -> Trajectory:
    """Return the same episode with the keys that this environment gives its states."""
    steps, observation = [], environment.reset(task_id=trajectory.task_id)
    for step in trajectory.steps:
        if observation.text != step.observation:
            raise ValueError(f"the replay of {trajectory.task_id} left its way at {observation.text!r}")
        steps.append(type(step)(step.observation, step.action, step.valid, observation.state_key))
        observation = environment.step(step.action).observation
    return Trajectory(trajectory.task_id, steps, trajectory.reward, trajectory.outcome)


def step_gradients(model: torch.nn.Module, steps: Sequence, used: np.ndarray) -> torch.Tensor:
    """(S, parameters) gradient of the log-probability of each step's completion; 0 where not `used`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.zeros(len(steps), sum(p.numel() for p in parameters))
    for row, step in enumerate(steps):
        if not used[row]:
            continue
        ids, length = torch.tensor([[*step.prompt_ids, *step.completion_ids]]), len(step.completion_ids)
        logits = model(ids, logits_to_keep=length + 1, use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(1, ids[0, -length:, None]).sum()
        torch.cat([g.flatten() for g in torch.autograd.grad(logp, parameters)], out=found[row])
    return found


def make_trainer(setting: str, model: Path, groups: int, folder: Path) -> tuple[G2POTrainer, Manifest]:
    """A trainer with the recipe's settings and games that it does not train on."""
    values = yaml.safe_load((ROOT / CONFIGS[setting]).read_text())
    size = values["game_size"]
    games = Path("~/.cache/g2po_trl").expanduser() / f"alfworld-{size}-{GAME_SEED}" / f"train-{groups}"
    generate_games(games, "train", groups, seed=GAME_SEED, size=size, progress=False)
    manifest = Manifest.scan(games)
    known = {field.name for field in fields(G2POConfig)}
    own = {"output_dir": str(folder / "out"), "beta": 0.0, "save_strategy": "no", "save_trajectories": False}
    own |= {"num_environment_workers": 1, "disable_tqdm": True, "use_cpu": True}
    own["per_device_train_batch_size"] = GROUP * min(groups, values["per_device_train_batch_size"] // GROUP)
    args = G2POConfig(**{name: value for name, value in values.items() if name in known} | own)
    if args.temperature != 1:
        raise ValueError(f"temperature is {args.temperature}: this benchmark is about gradients at temperature 1")
    trainer = G2POTrainer(
        str(model),
        args,
        Dataset.from_list(manifest.rows()),
        environment_factory=partial(tiny_environment, manifest),
        prompt_template=ALFWORLD_COMPACT_PROMPT,
    )
    return trainer, manifest


def collect(options: argparse.Namespace, folder: Path) -> dict:
    """Play, and write each group's gradient by each method to `folder`; what is there is not done again."""
    trainer, manifest = make_trainer(options.setting, options.model, options.groups, folder)
    model, args, rows = trainer.model.eval(), trainer.args, manifest.rows()
    environment = tiny_environment(manifest, key="memory")
    done = json.loads((folder / "done.json").read_text()) if (folder / "done.json").exists() else {"groups": []}
    store = None
    for start in range(len(done["groups"]), options.groups, ITERATION):
        part = rows[start : start + ITERATION]
        began, file = time.perf_counter(), folder / f"trajectories-{start:04d}.jsonl"
        if not file.exists():
            torch.manual_seed(1000 * options.seed + start)
            played, _ = trainer.play(
                [row for row in part for _ in range(GROUP)], groups=[i // GROUP for i in range(GROUP * len(part))]
            )
            write_jsonl(beside := file.with_suffix(".tmp"), played)
            beside.replace(file)
        played = list(read_jsonl(file))
        took = time.perf_counter() - began
        for number in range(len(part)):
            began, group = time.perf_counter(), played[number * GROUP : (number + 1) * GROUP]
            of_key = {"released": [group], "memory": [[replayed(t, environment) for t in group]]}
            made = advantages(of_key, args.gamma, args.invalid_action_penalty, args.history_length)
            weights = np.stack(list(made.values()))
            steps = [step for trajectory in group for step in trajectory.steps]
            gradients = step_gradients(model, steps, (weights != 0).any(0))
            if store is None:
                shape = (len(made), options.groups, gradients.shape[1])
                mode = "r+" if (folder / "gradients.npy").exists() else "w+"
                store = np.lib.format.open_memmap(folder / "gradients.npy", mode, np.float32, shape)
            store[:, start + number] = (torch.from_numpy(weights).float() @ gradients).numpy()
            seconds = time.perf_counter() - began + took / len(part)
            done["groups"].append(
                {"wins": sum(t.success for t in group), "steps": len(steps), "seconds": round(seconds, 2)}
            )
        store.flush()
        write_json(folder / "done.json", done | {"names": list(made)})
        print(f"{len(done['groups'])} of {options.groups} groups, {sum(g['seconds'] for g in done['groups']):.0f} s")
    trainer.close()
    return json.loads((folder / "done.json").read_text())


def inner_products(folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """`GEOMETRY/METHOD/own` and `GEOMETRY/METHOD/REFERENCE` -> (groups, groups)."""

    def vectors(name: str) -> torch.Tensor:  # opened anew each time: what was read need not stay in memory
        return torch.from_numpy(np.array(np.load(folder / "gradients.npy", mmap_mode="r")[names.index(name)]))

    root = vectors(REFERENCE).square_().mean(0).sqrt().sqrt()
    scales = {"plain": torch.ones_like(root), "adam": torch.where(root > 0, 1 / root, 0.0)}
    references = (REFERENCE, DISCOUNTED)
    scaled = {(of, geometry): vectors(of) * scale for of in references for geometry, scale in scales.items()}
    found = {}
    for name in names:
        gradients = vectors(name)
        for geometry, scale in scales.items():
            own = gradients * scale
            found[f"{geometry}/{name}/own"] = (own @ own.T).double().numpy()
            for of in references:
                found[f"{geometry}/{name}/{of}"] = (own @ scaled[of, geometry].T).double().numpy()
    return found


# -- command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="what the policy is called in the results")
    parser.add_argument("--model", type=Path, default=tiny_model_path())
    parser.add_argument("--setting", choices=list(CONFIGS), default="short")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/credit_signal")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/credit_signal"))
    parser.add_argument("--report", action="store_true", help="measure nothing: write the table of what is there")
    options = parser.parse_args()
    if options.name is None and not options.report:
        parser.error("give the policy a name, or --report")
    if options.groups < 4:
        parser.error(f"--groups is {options.groups}: two halves need at least 4")
    torch.set_num_threads(1)
    path = options.results / f"{options.name}.json"
    if not options.report and not path.exists():
        asked = [str(options.model), options.setting, options.groups, options.seed]
        folder = options.work.expanduser() / options.name
        if (folder / "asked.json").exists() and json.loads((folder / "asked.json").read_text()) != asked:
            parser.error(f"{folder} holds the beginning of another run: delete it or choose another name")
        write_json(folder / "asked.json", asked)
        if not (folder / "products.npz").exists():
            np.savez(folder / "products.npz", **inner_products(folder, collect(options, folder)["names"]))
            (folder / "gradients.npy").unlink()  # gigabytes; from the products all else follows
        done, products = json.loads((folder / "done.json").read_text()), np.load(folder / "products.npz")
        names = done["names"]
        steps, wins = (sum(group[what] for group in done["groups"]) for what in ("steps", "wins"))
        raw = {  # each group's square, and its products with all others' gradients and all others' references
            name: {
                "squares": np.diag(own := products[f"plain/{name}/own"]),
                "others": own.sum(1) - np.diag(own),
                "others' reference": (cross := products[f"plain/{name}/{REFERENCE}"]).sum(1) - np.diag(cross),
            }
            for name in names
        }
        run = {
            "policy": options.name,
            "setting": options.setting,
            **facts("torch", "transformers", "trl", "numpy", "alfworld"),
            "seeds": {"games": GAME_SEED, "sampling": options.seed, "splits and draws": 0},
            "seconds": round(sum(group["seconds"] for group in done["groups"])),
            "groups": options.groups,
            "success": wins / (GROUP * options.groups),
            "steps": steps,
            **{geometry: analyse(products, names, geometry) for geometry in ("plain", "adam")},
            "played": done["groups"],
            "raw": {name: {k: [float(f"{x:.5g}") for x in v] for k, v in of.items()} for name, of in raw.items()},
        }
        write_json(path, run)
    text = table(options.results)
    (options.results / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
