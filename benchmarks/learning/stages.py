"""What `comparison.py` plays: stages of runs, in the order in which they are played.

*main*, eight arms on the default recipe with seeds 100 to 111, seed by seed; *treasure*, the README's program with
SmolLM2-135M; *rates*, the learning rate twice and half; *methods*, five other methods; *webshop*; *weights*, the sweep
of w; *prompted*, *smollm2-pilot*, *pretrained*, *smollm2*, *smollm2-rooms*: SmolLM2 on ALFWorld.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import yaml

from benchmarks.common import ROOT

ALFWORLD, WEBSHOP = "recipes/alfworld/tiny.yaml", "recipes/webshop/tiny.yaml"
SMOLLM2, TREASURE = "benchmarks/learning/smollm2.yaml", "benchmarks/learning/treasure.yaml"
# Placeholders of paths that differ from machine to machine; results keep them as they are.
TAUGHT, GAME = "TAUGHT", "TREASURE.py"  # SmolLM2 after `g2po teach alfworld`; the README's program
REFERENCE, START = "g2po", "start"  # START: the initial model, measured once a setting

ESTIMATOR = "--advantage_estimator"
ARMS: dict[str, tuple[str, ...]] = {
    "g2po": (),
    "g2po λ 0.5": ("--value_lambda", "0.5"),
    "gigpo": (ESTIMATOR, "gigpo"),
    "grpo": (ESTIMATOR, "grpo"),
    "grpo discounted": (),  # by another script
    "g2po without A_NC": ("--estimator_kwargs", '{"node_centric": false}'),
    "g2po without A_EC": ("--estimator_kwargs", '{"edge_centric": false}'),
    "g2po without aggregation": ("--estimator_kwargs", '{"aggregate": false}'),
}
SHOWN = {name: (ESTIMATOR, name) for name in ("hgpo", "graphgpo", "crbc", "rloo")} | {"ppo": ()}
TREASURE_ARMS = ("g2po", "g2po λ 0.5", "gigpo", "grpo")
RATE_ARMS, RATES = ("g2po", "gigpo", "grpo"), {"learning rate × 2": 2.0, "learning rate × ½": 0.5}
WEBSHOP_ARMS = ("g2po", "gigpo", "grpo", "rloo", "ppo")
WEIGHTS = (0.25, 0.5, 2.0)  # w = 1 is G2PO and w = 0 is GRPO, both of the main stage
SEEDS = {"main": range(100, 112), "methods": range(100, 104), "webshop": range(100, 104)}
SEEDS |= {stage: range(100, 103) for stage in ("treasure", "rates", "weights")}
SEEDS |= {stage: range(100, 102) for stage in ("smollm2", "smollm2-rooms")} | {"smollm2-pilot": range(100, 101)}
SEEDS |= {"pretrained": range(2)}

# Two optimizer steps or more a rollout of 8 tasks x 4 episodes, some 400 step samples.
FEW = ("--num_generations", "4", "--per_device_train_batch_size", "32", "--mini_batch_size", "96")
# bfloat16 needs arithmetic that not every CPU has; in float32 all machines compute alike.
FLOAT32 = ("--bf16", "false")
PILOT = {
    "full weights": ("--learning_rate", "1e-5", "--adam_beta2", "0.95", "--warmup_steps", "2")
    + ("--lr_scheduler_type", "constant_with_warmup"),
    "LoRA": ("--learning_rate", "3e-4", "--use_peft", "true", "--lora_r", "8", "--lora_alpha", "16")
    + ("--lora_target_modules", "all-linear"),
}
ROOMS = ("--game_size", "small", "--max_turns", "30", "--max_prompt_length", "768")


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        stage, arm, seed: its name.
        words: of `g2po train`, without seed and output folder. None: nothing is trained.
        games: held-out tasks of a panel.
        panels: temperature -> how often the panel is played after training.
        until: values of `max_steps` at which the run is looked at, in turn: panels are played, and it ends if it has
            come to `gain` or `reach`. Empty: at the end alone.
        gain: rise of success on the panel at temperature 1 over the stage's start that ends it, in points.
        reach: mean training success of three iterations that ends it.
        evaluate: words of `g2po evaluate` for a prompted model, instead of training.
        pretrained: starts from SmolLM2 as taught.
    """

    stage: str
    arm: str
    seed: int
    words: tuple[str, ...] = ()
    games: int = 576
    panels: tuple[tuple[float, int], ...] = ((1.0, 2), (0.4, 1))
    until: tuple[int, ...] = ()
    gain: float | None = None
    reach: float | None = None
    evaluate: tuple[str, ...] = ()
    pretrained: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """Return stage, arm and seed."""
        return self.stage, self.arm, self.seed

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        arm = self.arm.translate(str.maketrans({" ": "-", ",": None, "λ": "lambda", "×": "x", "½": "half"}))
        return f"{arm}-seed{self.seed}"


def alfworld(stage: str, arm: str, seed: int, *flags: str) -> Job:
    """Return the default recipe as it is, with a method's flags; its own panel is short, as larger ones follow."""
    target, config = "alfworld", ALFWORLD
    if arm == "grpo discounted":
        target = "benchmarks/credit/train_discounted.py"
    if arm == "ppo":
        target, config = "alfworld-ppo", ALFWORLD.replace(".yaml", "-ppo.yaml")
    common = ("--eval_on_start", "false", "--num_eval_games", "12", "--save_total_limit", "1")
    words = (target, "--config", config, *common, "--num_environment_workers", "1")
    return Job(stage, arm, seed, (*words, *({**SHOWN, **ARMS}.get(arm, ())), *flags))


def start(job: Job, *flags: str) -> Job:
    """Return the model that runs like `job` start from, in their place: one iteration at learning rate 0."""
    return replace(job, arm=START, words=(*job.words, "--learning_rate", "0", "--max_steps", "1", *flags), until=())


def main_stage() -> list[Job]:
    """Return the preregistered comparison: seeds outside, arms inside, so that what is there is balanced."""
    jobs = [alfworld("main", arm, seed) for seed in SEEDS["main"] for arm in ARMS]
    return [start(jobs[0]), *jobs]


def treasure() -> list[Job]:
    """Return the README's Treasure with a pretrained model: iterations until 80 % are won, looked at every ten."""
    words = (f"{GAME}:Treasure", "--config", TREASURE, "--model_name_or_path", TAUGHT)
    words += ("--num_environment_workers", "1", *FLOAT32)
    until = (50, 100, 150, 200)  # optimizer steps, five an iteration
    return [
        Job("treasure", arm, seed, (*words, *ARMS[arm]), 0, (), until, reach=0.8, pretrained=True)
        for seed in SEEDS["treasure"]
        for arm in TREASURE_ARMS
    ]


def rates() -> list[Job]:
    """Return a learning rate twice and half that of the recipe; the recipe's own is in the main stage."""
    rate = float(yaml.safe_load((ROOT / ALFWORLD).read_text())["learning_rate"])
    return [
        replace(alfworld("rates", arm, seed, "--learning_rate", f"{factor * rate:g}"), arm=f"{arm}, {name}")
        for seed in SEEDS["rates"]
        for arm in RATE_ARMS
        for name, factor in RATES.items()
    ]


def methods() -> list[Job]:
    """Return the methods that are shown and not tested."""
    return [alfworld("methods", arm, seed) for seed in SEEDS["methods"] for arm in SHOWN]


def webshop() -> list[Job]:
    """Return the methods on WebShop."""
    common = ("--num_eval_goals", "12", "--save_total_limit", "1", "--num_environment_workers", "1")
    targets = dict.fromkeys(WEBSHOP_ARMS, ("webshop", WEBSHOP))
    targets["ppo"] = ("webshop-ppo", WEBSHOP.replace(".yaml", "-ppo.yaml"))
    jobs = [
        Job("webshop", arm, seed, (target, "--config", config, *common, *{**SHOWN, **ARMS}[arm]), games=192)
        for seed in SEEDS["webshop"]
        for arm, (target, config) in targets.items()
    ]
    return [start(jobs[0]), *jobs]


def weights() -> list[Job]:
    """Return the sweep of w, the weight of the step advantages."""
    return [
        replace(alfworld("weights", "g2po", seed, "--step_advantage_weight", f"{w:g}"), arm=f"w {w:g}")
        for seed in SEEDS["weights"]
        for w in WEIGHTS
    ]


def smollm2(stage: str, arms: dict[str, tuple[str, ...]], until: tuple[int, ...], *flags: str) -> list[Job]:
    """Return SmolLM2 on ALFWorld: its start, and the arms from there."""
    words = ("alfworld", "--config", SMOLLM2, "--model_name_or_path", TAUGHT)
    words += ("--num_eval_games", "12", "--eval_on_start", "false", "--save_total_limit", "1", *flags)
    words += ("--num_environment_workers", "1")
    jobs = [
        Job(stage, arm, seed, (*words, *of), games=96, until=until, gain=20.0, pretrained=True)
        for seed in SEEDS[stage]
        for arm, of in arms.items()
    ]
    one_group = ("--per_device_train_batch_size", "4" if "--num_generations" in words else "8")
    return [start(replace(jobs[0], words=words), *one_group), *jobs]


def pretrained() -> list[Job]:
    """Return the settings of smollm2.yaml as they are, one optimizer step an iteration, looked at midway."""
    jobs = smollm2("pretrained", {arm: ARMS[arm] for arm in ("g2po", "grpo")}, (13, 25))
    return [replace(job, panels=((1.0, 1),), gain=None) for job in jobs]


def prompted() -> list[Job]:
    """Return SmolLM2's start as a prompted agent."""
    jobs = []
    for agent in ("direct", "react"):
        words = ("--model", TAUGHT, "--environment", "alfworld", "--agent", agent, "--max-turns", "15")
        words += ("--max-completion-length", "96", *(("--history-length", "2") if agent == "direct" else ()))
        jobs.append(Job("prompted", agent, 0, games=96, panels=((0.4, 1),), evaluate=words, pretrained=True))
    return jobs


STAGES: dict[str, Callable[[], list[Job]]] = {
    "main": main_stage,
    "treasure": treasure,
    "rates": rates,
    "methods": methods,
    "webshop": webshop,
    "weights": weights,
    "prompted": prompted,
    "pretrained": pretrained,
    "smollm2-pilot": lambda: smollm2("smollm2-pilot", PILOT, (12,), *FEW, *FLOAT32),
}
# These wait for the pilot, which decides how weights are trained.
AFTER_PILOT = {"smollm2": (), "smollm2-rooms": ROOMS}
ALL = (*STAGES, *AFTER_PILOT)


def jobs_of(stages: Sequence[str], winner: str | None) -> list[Job]:
    """Return the jobs of stages, in order. `winner`: the pilot's; without one its successors have no jobs yet."""
    jobs = []
    for stage in stages:
        if stage in STAGES:
            jobs += STAGES[stage]()
        elif winner is not None:
            arms = {arm: (*PILOT[winner], *ARMS[arm]) for arm in ("g2po", "grpo")}
            jobs += smollm2(stage, arms, (15, 30, 45, 60), *FEW, *FLOAT32, *AFTER_PILOT[stage])
    return jobs


def smoke(job: Job) -> Job:
    """Return the smallest run that goes through the same code: no result, a test of the machinery."""
    games = min(job.games, 6)
    if job.evaluate:
        return replace(job, games=games, evaluate=(*job.evaluate, "--max-turns", "2", "--max-completion-length", "24"))
    group = "2" if job.pretrained else "8"
    words = ["--max_turns", "3" if job.pretrained else "8", "--per_device_train_batch_size", group]
    words += ["--steps_per_generation", "1", "--num_generations", group]
    if GAME not in job.words[0]:
        tasks = "goals" if "webshop" in job.words[0] else "games"
        words += [f"--num_eval_{tasks}", "6", f"--num_{tasks}", "12"]
    if job.arm != START:
        words += ["--max_steps", "2"]
    return replace(job, words=(*job.words, *words), games=games, until=(1, 2) if job.until else ())
