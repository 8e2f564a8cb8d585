"""A language model plays the tabular household as text: its exact success, and credit against the truth, along a run.

    python -m benchmarks.credit.language --output benchmarks/results/truth_language [--model MODEL] [--houses 8 …]
    python -m benchmarks.credit.language --output benchmarks/results/truth_language --report

`G2POTrainer` trains the model with the settings of a recipe, on 8 houses unless `--houses` says otherwise; 8 groups of
8 episodes an iteration. Every few iterations all prompts of the first 8 houses and of 4 held-out ones pass through the
model with all admissible actions (`language_policy.py`), and backward induction over the turns gives the exact
probability to win a house (`exact.py`): learning curves without the noise of evaluations, at temperatures 1.0 and 0.4.

At the start, soon after, in the middle and at the end every estimator values the same steps, as in `truth.py`, which
explains the measures: in each of the first 8 houses 16 iterations of 8 groups of 8 episodes, drawn from the exact
policy at temperature 1. States are told apart by what the model reads, as the run's own are, and for some estimators
also by the whole state. The gradient is that of the logits of the actions, with a softmax for each prompt over the
admissible ones and "anything else". Intervals: Student's over houses.

The exact success is held against episodes of the real rollout, which also count how often an action is written in
another way than the one that is scored. What is in WORK is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import ROOT, facts
from benchmarks.credit.exact import success_rate
from benchmarks.credit.language_house import HOUSE_PROMPT, HouseEnvironment, text_house
from benchmarks.credit.language_policy import COMPLETION, action_probabilities, policy_of, prompt_numbers
from benchmarks.credit.language_report import report
from benchmarks.credit.truth import DEFAULT, METHODS, Task, compare, summary
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_envs.tiny.evaluation import play
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.utils.json import write_json

TRAINING, HELD_OUT = range(8), range(1000, 1004)  # measured; more houses may be trained on
TEMPERATURES = (1.0, 0.4)
GROUPS, GROUP = 8, 8  # of an iteration
WHOLE_STATE = ("gigpo", "g2po", "g2po, λ 0.5", "g2po, λ 0")


def rows(houses: Sequence[int], sees_all: bool) -> list[dict[str, Any]]:
    """Return a task for each house."""
    return [
        {"task_id": f"house {house}", "task_type": "household", "house": house, "sees_all": sees_all}
        for house in houses
    ]


def train(options: argparse.Namespace, houses: int, folder: Path) -> list[float]:
    """Train into `folder/checkpoint-N` unless that is done; return the rollouts' success by iteration."""
    done = folder / "success.json"
    if not done.exists():
        values = yaml.safe_load(options.recipe.read_text(encoding="utf-8"))
        known = {field.name for field in fields(G2POConfig)}
        own = {
            "output_dir": str(folder),
            "seed": options.seed,
            "advantage_estimator": options.method,
            "max_turns": options.turns,
            "history_length": 0,
            "num_generations": GROUP,
            "per_device_train_batch_size": GROUP * GROUPS,
            "steps_per_generation": 1,
            "max_steps": options.iterations,
            "save_strategy": "steps",
            "save_steps": options.every,
            "save_total_limit": None,
            "save_trajectories": False,
            "eval_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "num_environment_workers": 1,
            "disable_tqdm": True,
            "use_cpu": True,
        }
        trainer = G2POTrainer(
            str(options.model),
            G2POConfig(**{name: value for name, value in values.items() if name in known} | own),
            tasks_dataset(rows(range(houses), options.sees_all)),
            environment_factory=HouseEnvironment,
            prompt_template=HOUSE_PROMPT,
        )
        trainer.train()
        trainer.close()
        name = "episode/success_rate"
        write_json(done, [entry[name] for entry in trainer.state.log_history if name in entry])
    return json.loads(done.read_text())


def tables(options: argparse.Namespace, model: Path, houses: Sequence[int], folder: Path) -> dict[int, np.ndarray]:
    """Return [house] a checkpoint's policy, (K, S, A); those in `folder` are not computed again."""
    found, loaded = {}, None
    for house in houses:
        path = folder / f"house-{house}.npy"
        if not path.exists():
            loaded = loaded or load(model)
            folder.mkdir(parents=True, exist_ok=True)
            np.save(path, action_probabilities(*loaded, text_house(house, sees_all=options.sees_all), TEMPERATURES))
        found[house] = np.load(path)
    return found


def load(model: Path) -> tuple:
    """Return a checkpoint's model and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval(), tokenizer


def exact_success(options: argparse.Namespace, by_house: dict[int, np.ndarray]) -> dict[str, dict[int, float]]:
    """Return [temperature][house] the probability that an episode wins."""
    texts = {house: text_house(house, sees_all=options.sees_all) for house in by_house}
    return {
        str(temperature): {
            house: success_rate(policy_of(texts[house], table[k], options.turns)) for house, table in by_house.items()
        }
        for k, temperature in enumerate(TEMPERATURES)
    }


def check(options: argparse.Namespace, model: Path, exact: dict[str, dict[int, float]], episodes: int) -> list[dict]:
    """Return, by temperature, the success of the real rollout beside the exact one, over the training houses.

    `z`: their difference over its standard error, known from the exact success of each house. `other_spelling`: share
    of steps that play an admissible action which was not written as it is scored.
    """
    policy, tokenizer = load(model)
    found = []
    for temperature in TEMPERATURES:
        of_house = np.array([exact[str(temperature)][house] for house in TRAINING])
        number = episodes // len(TRAINING)
        played = play(
            policy,
            tokenizer,
            HouseEnvironment,
            HOUSE_PROMPT,
            0,
            rows([*TRAINING] * number, options.sees_all),
            temperature,
            options.turns,
            options.seed,
            batch_size=256,
        )
        steps = [step for trajectory in played for step in trajectory.steps]
        admissible = [step for step in steps if step.action in step.admissible_actions]
        scored = [
            tokenizer(COMPLETION.format(action=step.action), add_special_tokens=False)["input_ids"]
            for step in admissible
        ]
        others = sum(step.completion_ids[: len(ids)] != ids for step, ids in zip(admissible, scored))
        success, error = (
            np.mean([t.success for t in played]),
            np.sqrt((of_house * (1 - of_house)).mean() / len(played)),
        )
        found.append(
            {
                "temperature": temperature,
                "episodes": len(played),
                "exact": of_house.mean(),
                "played": success,
                "z": (success - of_house.mean()) / error if error > 0 else 0.0,
                "admissible": len(admissible) / len(steps),
                "other_spelling": others / len(steps),
            }
        )
    return found


def credit(options: argparse.Namespace, by_house: dict[int, np.ndarray], iterations: int) -> dict:
    """Return [estimator][measure] of `truth.py` at temperature 1, over houses.

    Some estimators value the same episodes once more, with keys that tell all states apart.
    """
    settings, results = {**DEFAULT, "turns": options.turns}, []
    for house, table in by_house.items():
        text = text_house(house, sees_all=options.sees_all)
        policy = policy_of(text, table[0], options.turns)
        read, whole = (
            Task(policy, [int(number).to_bytes(16, "little") for number in numbers])
            for numbers in (policy.state_class, range(text.num_states))
        )
        found = compare([read], settings, np.random.default_rng([options.seed, house]), iterations)
        again = compare([whole], settings, np.random.default_rng([options.seed, house]), iterations, WHOLE_STATE)
        results.append(found | {f"{name}, whole state as key": of for name, of in again.items()})
    return summary(results)


def look(options: argparse.Namespace, model: Path, by_house: dict[int, np.ndarray], path: Path) -> dict[str, Any]:
    """Return `check` and `credit` of a checkpoint, which `path` keeps."""
    if not path.exists():
        trained = {house: by_house[house] for house in TRAINING}
        found = check(options, model, exact_success(options, trained), options.episodes)
        print(json.dumps(found), flush=True)
        write_json(path, {"check": found, "credit": credit(options, trained, options.credit_iterations)})
    return json.loads(path.read_text())


def measure(options: argparse.Namespace, houses: int, work: Path) -> dict[str, Any]:
    """Return a run's curve, and what is true of some of its checkpoints."""
    folder = work / f"{houses}-houses"
    found: dict[str, Any] = {"rollouts": train(options, houses, folder), "success": {}, "check": {}, "credit": {}}
    steps = [*range(0, options.iterations + 1, options.every)]
    for step in steps:
        model, kept = (folder / f"checkpoint-{step}", folder / f"{step}") if step else (options.model, work / "0")
        by_house = tables(options, model, [*TRAINING, *HELD_OUT], kept)
        found["success"][step] = exact_success(options, by_house)
        print(
            houses,
            step,
            {of: round(np.mean([*by.values()]), 3) for of, by in found["success"][step].items()},
            flush=True,
        )
        if step in {0, steps[1], steps[len(steps) // 2], steps[-1]}:
            looked = look(options, model, by_house, kept / "looked.json")
            found["check"][step], found["credit"][step] = looked["check"], looked["credit"]
    return found


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was run, on what, with what."""
    model = AutoModelForCausalLM.from_pretrained(str(options.model))
    texts = {house: text_house(house, sees_all=options.sees_all) for house in (*TRAINING, *HELD_OUT)}
    config = {
        name: value for name, value in vars(options).items() if name not in ("output", "work", "report", "model")
    }
    return {
        **facts("torch", "transformers", "trl", "numpy", "alfworld"),
        "model": {"parameters": model.num_parameters(), "sum of squares": squares(model)},
        "settings": config | {"recipe": options.recipe.name},
        "training": [*TRAINING],
        "held_out": [*HELD_OUT],
        "houses": {
            house: {
                "task": text.task,
                "places": text.places,
                "objects": text.objects,
                "states": text.num_states,
                "prompts": int(prompt_numbers(text).max()) + 1,
                "shortest": text.house.shortest,
            }
            for house, text in texts.items()
        },
        "estimators": list(METHODS),
    }


def squares(model: torch.nn.Module) -> float:
    """Return a number that tells initial models apart."""
    return round(sum(float(p.detach().double().square().sum()) for p in model.parameters()), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=tiny_model_path(), help="the initial model")
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "recipes/alfworld/tiny.yaml", help="its training settings"
    )
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/truth_language"))
    parser.add_argument("--houses", type=int, nargs="+", default=[8], help="to train on; a run for each number")
    parser.add_argument("--method", default="g2po", help="advantage_estimator")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="iterations from one point of the curve to the next")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sees-all", action="store_true", help="a prompt for each state, 30 times as long to compute")
    parser.add_argument("--credit-iterations", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=256, help="of the real rollout, to check the exact success")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="table and figure of what is there")
    options = parser.parse_args()
    if not options.report:
        torch.set_num_threads(1)
        work = options.work.expanduser()
        runs = {f"{houses} houses": measure(options, houses, work) for houses in options.houses}
        write_json(options.output / "results.json", {**described(options), "runs": runs})
    print(report(options.output))


if __name__ == "__main__":
    main()
