"""Where the numbers of the pages come from: what `said.txt` calls.

Raw values of `results`, read and summed up here and not by the code that wrote the tables; recipes. Success is in
percent. A function returns a number, (number, half width of its 95 % interval or what its docstring says) or
(number, lower end, upper end).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import yaml
from scipy import optimize, stats

from benchmarks.common import RESULTS, ROOT, read_lines, read_text
from benchmarks.gpu import methods

# truth.py
G2PO, GIGPO, GRPO = "g2po", "gigpo", "grpo (A_EP)"
NO_NC, NO_EC, FLAT = "g2po without A_NC", "A_EP + A_NC, aggregated", "g2po without aggregation"
HALF, ZERO, TRUE = "g2po, λ 0.5", "g2po, λ 0", "true advantage"
WRONG_KEYS = ("key without processing", "key of the place alone")
# results/comparison, stage main: G2PO and the seven arms that are tested against it
ARMS = (
    *("g2po", "g2po λ 0.5", "gigpo", "grpo", "grpo discounted"),
    *("g2po without A_NC", "g2po without A_EC", "g2po without aggregation"),
)


@cache
def raw(path: str) -> Any:
    return json.loads(read_text(RESULTS / path))


def times_of_tree(arm: str, samples: str) -> float:
    """CPU seconds of an update by an arm, over those of `token_layout: shared`: medians."""
    seconds = raw("positions/results.json")[samples]["CPU seconds"]
    return float(np.median(seconds[arm]) / np.median(seconds["tree"]))


@cache
def recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))


def episodes(name: str) -> int:
    """Of an iteration."""
    return recipe(name)["per_device_train_batch_size"] * recipe(name)["steps_per_generation"]


def parameters(folder: str) -> int:
    """Of a model: from the head of its safetensors file."""
    with (ROOT / folder / "model.safetensors").open("rb") as file:
        head = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(int(np.prod(of["shape"])) for name, of in head.items() if name != "__metadata__")


def student(values: Sequence[float]) -> tuple[float, float]:
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


# --- Against the exact gradient: truth.py


def by_house(estimator: str, setting: str, measure: str = "cosine") -> np.ndarray:
    return np.array(raw("truth/results.json")["results"][setting][estimator][measure]["values"])


def cosine(estimator: str, setting: str = "default") -> tuple[float, float]:
    return student(by_house(estimator, setting))


def mean(estimator: str, setting: str = "default", measure: str = "cosine") -> float:
    return float(by_house(estimator, setting, measure).mean())


def less(a: str, b: str, setting: str = "default", other: str | None = None) -> tuple[float, float]:
    """a's cosine less b's (in another setting), paired by house."""
    return student(by_house(a, setting) - by_house(b, other or setting))


def of_language_model(estimator: str) -> tuple[float, float]:
    """Cosine less G2PO's before training, paired by house: results/truth_language."""
    before = raw("truth_language/results.json")["runs"]["8 houses"]["credit"]["0"]
    values, of_g2po = (np.array(before[name]["cosine"]["values"]) for name in (estimator, G2PO))
    return student(values - of_g2po)


def ranked(a: str, b: str, rank: int) -> tuple[float, float]:
    """`less` in the setting where it is the largest (0), the next (1), …, the smallest (-1).

    Of the settings of one house with right keys; nan if a is not significantly ahead of b in each of them.
    """
    settings = [name for name in raw("truth/results.json")["results"] if name not in WRONG_KEYS]
    found = sorted((less(a, b, name) for name in settings if not options(name)["mixed"]), reverse=True)
    return found[rank] if all(difference > half for difference, half in found) else (float("nan"), float("nan"))


def success(setting: str = "default") -> float:
    return 100 * options(setting)["success"]


def options(setting: str = "default") -> dict[str, Any]:
    facts = raw("truth/results.json")
    return {**facts["defaults"], **facts["settings"][setting]}


# --- Without a language model: credit.py, credit_lambda.py


def areas(estimator: str, norm: str) -> tuple[float, float, float]:
    """Mean success during training with updates of a fixed norm."""
    of = raw("credit/results.json")["unit"][estimator][norm]
    return float(np.mean(of["areas"])), *of["interval"]


def best_area(estimator: str) -> float:
    """At its own best learning rate."""
    return max(float(np.mean(of["areas"])) for of in raw("credit/results.json")["plain"][estimator].values())


def area_by_group(estimator: str, size: int) -> float:
    """Mean success during training in groups of that size, with updates of norm 1."""
    return float(np.mean(raw("credit/results.json")["sweeps"]["group_size"][estimator][str(size)]["areas"]))


def by_lambda(value: float, setting: str = "default") -> tuple[float, float]:
    """Mean success during training less that with λ = 1, paired by house."""
    runs = read_lines(RESULTS / "credit_lambda/runs.jsonl")
    area = {(run["setting"], run["value_lambda"], run["seed"]): run["area"] for run in runs}
    houses = [seed for name, of, seed in area if (name, of) == (setting, value)]
    return student([area[setting, value, house] - area[setting, 1.0, house] for house in houses])


def lost_by_lambda(value: float, setting: str) -> tuple[float, float]:
    difference, half = by_lambda(value, setting)
    return -difference, half


# --- Learning curves: results/comparison


@cache
def comparison() -> dict[tuple[str, str, int], dict[str, Any]]:
    """(stage, arm, seed) -> run."""
    return {(run["stage"], run["arm"], run["seed"]): run for run in read_lines(RESULTS / "comparison/runs.jsonl")}


def compared(arm: str) -> list[dict[str, Any]]:
    """Runs of an arm, by seed."""
    return [run for (stage, of, _), run in sorted(comparison().items()) if (stage, of) == ("main", arm)]


def printed(file: str, pattern: str) -> list[float]:
    """Numbers in the lines of a recorded output that match."""
    text = (RESULTS / "readme" / file).read_text(encoding="utf-8")
    return [float(one) for match in re.finditer(pattern, text, re.MULTILINE) for one in match.groups()]


def repaired(model: str) -> float:
    """Percent of the held-out episodes in which a coding agent repaired the repository."""
    return 100 * float(np.mean([*raw("coding/new-functions.json")["successes by task"][model].values()]))


def minutes_of_training(percentile: float) -> float:
    """Of the default recipe's runs without an interruption, on two cores with other runs beside them."""
    whole = [run["attempts"][0] for arm in ARMS for run in compared(arm) if run["attempts"][0]["exit"] == 0]
    return float(np.percentile([part["seconds"] / 60 for part in whole], percentile))


def outcome(arm: str, number: str) -> np.ndarray:
    """By seed: `first half` or all of `training`, held-out at `1` or `0.4`; `both` is the mean of training and `1`."""
    if number == "both":
        return (outcome(arm, "training") + outcome(arm, "1")) / 2
    if number in ("first half", "training"):
        curves = np.array([run["training"]["success"] for run in compared(arm)])
        return 100 * curves[:, : curves.shape[1] // 2 if number == "first half" else None].mean(1)
    plays = [run["held_out"][-1][number]["won"] for run in compared(arm)]
    return np.array([100 * np.mean([one == "1" for won in of for one in won]) for of in plays])


def compare(arm: str, number: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    return mean_and_deviation(outcome(arm, number))


def paired(arm: str, number: str) -> tuple[float, float, float]:
    """An arm minus G2PO: mean over seeds and Student's interval, for this comparison alone."""
    mean, half = student(outcome(arm, number) - outcome("g2po", number))
    return mean, mean - half, mean + half


@cache
def _dunnett(number: str) -> tuple[dict[str, float], float, int]:
    """Differences to G2PO in complete blocks, their standard error, and its degrees of freedom."""
    values = np.array([outcome(arm, number) for arm in ARMS])
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (len(ARMS) - 1) * (values.shape[1] - 1)
    error = np.sqrt((rest**2).sum() / freedom * 2 / values.shape[1])
    return dict(zip(ARMS, values.mean(1) - values[0].mean())), error, freedom


def _none_beyond(limit: float, freedom: int) -> float:
    """Probability that no |t| of the seven exceeds the limit: differences to one reference correlate by 1/2."""
    z, of_z = np.polynomial.hermite_e.hermegauss(60)
    share = (np.arange(400) + 0.5) / 400
    scale = np.sqrt(stats.chi2.ppf(share, freedom) / freedom)
    upper = np.sqrt(2) * limit * scale[:, None]
    inside = (stats.norm.cdf(z + upper) - stats.norm.cdf(z - upper)) ** (len(ARMS) - 1)
    return float((inside @ (of_z / of_z.sum())).mean())


def tested(arm: str, number: str) -> tuple[float, float, float]:
    """An arm minus G2PO, with Dunnett's simultaneous interval."""
    differences, error, freedom = _dunnett(number)
    limit = optimize.brentq(lambda t: _none_beyond(t, freedom) - 0.95, 1.5, 5)
    return differences[arm], differences[arm] - limit * error, differences[arm] + limit * error


def tested_p(arm: str, number: str) -> float:
    """Dunnett's p."""
    differences, error, freedom = _dunnett(number)
    return 1 - _none_beyond(abs(differences[arm]) / error, freedom)


def unstable(runs: Iterable[dict[str, Any]]) -> int:
    """How many had a KL above 0.5 or fewer than 95 % valid completions in an iteration."""
    return sum(max(run["training"]["kl"]) > 0.5 or min(run["training"]["valid"]) < 0.95 for run in runs)


def of_stage(arm: str, stage: str, seeds: Sequence[int] = range(100, 104)) -> list[dict[str, Any]]:
    """Runs of an arm in a stage, by seed."""
    return [comparison()[stage, arm, seed] for seed in seeds]


def shown(arm: str, stage: str = "methods", seeds: Sequence[int] = range(100, 104)) -> float:
    """An arm of an untested stage minus G2PO with the same seeds, in the first half of training."""

    def first_half(runs: list[dict[str, Any]]) -> np.ndarray:
        curves = np.array([run["training"]["success"] for run in runs])
        return curves[:, : curves.shape[1] // 2]

    return 100 * float(
        first_half(of_stage(arm, stage, seeds)).mean() - first_half(of_stage("g2po", "main", seeds)).mean()
    )


def at_rate(arm: str, factor: str) -> float:
    """Success in the first half at "2" times or "½" the recipe's learning rate, minus the arm's at the recipe's."""
    seeds = range(100, 103)
    return shown(f"{arm}, learning rate × {factor}", "rates", seeds) - shown(arm, "main", seeds)


def at_weight(w: float) -> float:
    """G2PO with another w minus G2PO, in the first half."""
    return shown(f"w {w:g}", "weights", range(100, 103))


def held_out_of(
    arm: str, stage: str = "methods", temperature: str = "1", seeds: Sequence[int] = range(100, 104)
) -> float:
    """Its success on held-out games."""
    won = "".join(play for run in of_stage(arm, stage, seeds) for play in run["held_out"][-1][temperature]["won"])
    return 100 * won.count("1") / len(won)


SHOP = ("g2po", "gigpo", "grpo", "rloo", "ppo")


def shop(arm: str, temperature: str) -> float:
    """WebShop's score on held-out goals, in percent."""
    runs = of_stage(arm, "webshop", [100] if arm == "start" else range(100, 104))
    return 100 * float(np.mean([np.mean(run["held_out"][-1][temperature]["score"]) for run in runs]))


def prompted(agent: str) -> float:
    """SmolLM2's start as a prompted agent, held-out success at 0.4."""
    return held_out_of(agent, "prompted", "0.4", [0])


def rooms(arm: str, temperature: str) -> float:
    """SmolLM2 in larger rooms, held-out success."""
    return float(rooms_by_game(temperature, arm).mean())


def rooms_iterations(seed: int) -> int:
    """After how many iterations that was."""
    (until,) = {of_stage(arm, "smollm2-rooms", [seed])[0]["held_out"][-1]["until"] for arm in ("g2po", "grpo")}
    return until


def rooms_by_game(temperature: str, *arms: str) -> np.ndarray:
    """By game, mean of arms and seeds."""
    panels = [run["held_out"][-1][temperature] for arm in arms for run in of_stage(arm, "smollm2-rooms", (100, 101))]
    assert len({panel["games"] for panel in panels}) == 1, "the runs' panels have different games"
    return 100 * np.mean([list(map(int, panel["won"][0])) for panel in panels], axis=0)


def rooms_gain(temperature: str, *arms: str) -> tuple[float, float]:
    """What arms gained over the starts, over games: mean and 95 % interval."""
    return student(rooms_by_game(temperature, *arms) - rooms_by_game(temperature, "start"))


def rooms_difference(arm: str, other: str, temperature: str) -> tuple[float, float]:
    """An arm minus another in larger rooms, over games: mean and 95 % interval."""
    return student(rooms_by_game(temperature, arm) - rooms_by_game(temperature, other))


# --- Learning curves from the earlier initial model: results/temperature, results/oracles


def at_temperature(temperature: str, when: str, model: str = "results") -> np.ndarray:
    """By game, mean of the plays."""
    of = raw(f"temperature/{model}.json")
    return 100 * np.array(list(of["temperatures"][temperature]["won"][when].values())) / of["seeds"]


def change(temperature: str, model: str = "results") -> tuple[float, float]:
    """By training, and its standard error over games."""
    initial, trained = (at_temperature(temperature, when, model) for when in ("initial", "trained"))
    return mean_and_error(trained - initial)


def by_play(temperature: str, when: str) -> tuple[float, float]:
    """Mean and standard deviation over plays of all games."""
    return mean_and_deviation(raw("temperature/results.json")["temperatures"][temperature][when]["by_seed"])


def by_type(temperature: str, when: str, kind: str) -> float:
    """Of the games whose type begins so."""
    of, kinds = raw("temperature/results.json"), raw("temperature/games.json")
    won = of["temperatures"][temperature]["won"][when]
    return 100 * float(np.mean([won[game] for game in won if kinds[game].startswith(kind)])) / of["seeds"]


def oracle(mode: str, temperature: float, model: str = "results") -> float:
    """Success with perfect copying or planning."""
    found = raw(f"oracles/{model}.json")["results"]
    return next(one["success"] for one in found if one["mode"] == mode and one["temperature"] == temperature)


def start_of(environment: str, temperature: str, seed: int, measure: str = "success") -> float:
    """Of a bundled model before training."""
    play = raw("tiny_models/results.json")[environment]["temperatures"][temperature][seed]
    return 100 * play["won"].count("1") / len(play["won"]) if measure == "success" else play[measure]


def by_history(history: str, seed: int, step: int = 40) -> float:
    """Held-out success at 1.0 by window or conversation."""
    panels = raw(f"history/{history}-seed{seed}.json")["panels"]
    return 100 * next(of["success_rate"] for of in panels if (of["step"], of["temperature"]) == (step, 1.0))


# --- SmolLM2-135M: pretrained.py, gpu/pretrained.py; costs


def smollm2(name: str) -> Any:
    """A setting of the runs on a CPU."""
    return yaml.safe_load((ROOT / "benchmarks/learning/smollm2.yaml").read_text(encoding="utf-8"))[name]


def on_gpu(file: str, stage: str, arm: str, seed: int) -> list[dict[str, Any]]:
    """The lines that a run on a GPU wrote."""
    content = raw(f"gpu/h200/{file}.json")
    (name,) = (
        name for name, run in content["runs"].items() if (run["stage"], run["arm"], run["seed"]) == (stage, arm, seed)
    )
    return content["parts"][name]["findings"]


def played(arm: str, temperature: float, at: int, seed: int | None = None) -> float:
    """Held-out success of SmolLM2 at the panel of that number, -1 is the last; without a seed, the mean of both."""
    seeds = (100, 101) if seed is None else (seed,)
    found = []
    for one in seeds:
        lines = on_gpu("smollm2", "smollm2", arm, one)
        found.append([line["panel"] for line in lines if line.get("temperature") == temperature][at])
    return 100 * float(np.mean(found))


def iterations_on_gpu(extreme: Callable[[Iterable[int]], int]) -> int:
    """The smallest or largest number of iterations of SmolLM2's runs on ALFWorld."""
    runs = [on_gpu("smollm2", "smollm2", arm, seed) for arm in ("g2po", "grpo") for seed in (100, 101)]
    return extreme(sum("success_rate" in line for line in lines) for lines in runs)


def minutes_on_gpu() -> float:
    """Of the longest of SmolLM2's runs on ALFWorld."""
    return max(part["seconds"] for part in raw("gpu/h200/smollm2.json")["parts"].values()) / 60


def method_on_gpu(arm: str, measure: str = "training") -> tuple[float, float, float]:
    """SmolLM2's difference to G2PO in points over seeds 200 to 203, and its simultaneous interval."""
    found = methods.comparison(raw("gpu/h200/methods.json"), measure).differences[arm]
    return found.mean, *found.interval


def ahead(mean: float, low: float, high: float) -> tuple[float, float, float]:
    """A difference with its interval, the other way round."""
    return -mean, -high, -low


def eight_seeds_on_gpu(arm: str, measure: str = "training") -> tuple[float, float, float]:
    """The same over seeds 200 to 207, training up to the iteration that all runs have."""
    sets = [raw(f"gpu/h200/{name}.json") for name in ("methods", "methods-more")]
    number = min(map(methods.iterations, sets))
    values = {key: value for one in sets for key, value in methods.numbers(one, number)[measure].items()}
    arms = {arm for arm, seed in values if seed >= 204}
    found = methods.dunnett({key: value for key, value in values.items() if key[0] in arms}, methods.REFERENCE)
    return found.differences[arm].mean, *found.differences[arm].interval


def treasure_found(arm: str, seed: int) -> int | None:
    """The first iteration of Treasure at which the mean of three reaches 80 %."""
    success = [
        line["success_rate"] for line in on_gpu("treasure-and-pilot", "treasure", arm, seed) if "success_rate" in line
    ]
    return next((at for at in range(3, len(success) + 1) if sum(success[at - 3 : at]) / 3 >= 0.8 - 1e-9), None)


def panel(method: str, seed: int, step: int) -> np.ndarray:
    """By game."""
    won = {one["step"]: one["won"] for one in raw(f"pretrained/{method}-seed{seed}.json")["panel"]}
    return 100 * np.array([int(one) for one in won[step]])


def after(method: str, seed: int) -> np.ndarray:
    return panel(method, seed, smollm2("max_steps"))


def gained(method: str) -> tuple[float, float]:
    """By both seeds, and its 95 % interval over games."""
    return student(np.mean([after(method, seed) - panel(method, seed, 0) for seed in (0, 1)], axis=0))


def official_change() -> tuple[float, float]:
    start, best = (
        np.mean([[int(one) for one in won] for won in raw(f"pretrained/official-{name}.json")["won"]], axis=0)
        for name in ("start", "best")
    )
    return student(100 * (best - start))


def milliseconds(released: bool = False) -> float:
    """Median, of the paper's rollout."""
    of = raw("advantage_speed/results.json")["sizes"]["the paper's rollout"]
    return 1000 * float(np.median(of["released_seconds" if released else "ours_seconds"]))
