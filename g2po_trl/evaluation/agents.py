"""The agent of a trained model."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from ..engines.sampling import Sampling, derived_seed
from ..environments.contract import Observation
from ..rollout.actor import PromptActor
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..runs.run_json import FILE, load_prompt, read_run
from ..utils.errors import G2POError
from ..utils.options import require


class TrainedAgent:
    """Chooses actions as in an evaluation of the model's run. `restart` begins another episode."""

    def __init__(self, actor: PromptActor, sampling: Sampling):
        self.actor, self.sampling, self.episode, self._number = actor, sampling, Episode(""), 0

    def restart(self) -> None:
        """Forget the episode so far."""
        self.episode, self._number = Episode(""), self._number + 1

    def act(self, observation: str | Observation) -> str:
        """Return the action for the next observation; for one with a chat request, the assistant's message as JSON."""
        episode = self.episode
        episode.observation = Observation(observation) if isinstance(observation, str) else observation
        episode.task = episode.task or episode.observation.task or ""
        session = self.actor.session(self.sampling, [derived_seed(0, self._number)], RolloutStats())
        session.ask([episode])
        if episode.outcome is not None:
            raise G2POError(episode.failure_reason or episode.error, "observation", observation)
        ((_, step),) = session.receive_steps(0.0)
        episode.steps.append(step)
        return step.action


def load_agent(folder: str | Path) -> TrainedAgent:
    """Return the agent of a run's `output_dir`, or of a model on the Hub that was pushed with its run.json."""
    from huggingface_hub import snapshot_download

    from .chat_models import load_local  # with torch, which is slow to import

    folder = str(folder) if Path(folder).is_dir() else snapshot_download(str(folder))
    run = read_run(folder)
    require("play" in run, "folder", folder, f"it holds no {FILE} of a run; pass its output_dir")
    play = run["play"]
    remedy = "its completions follow a regex, which vLLM alone does; use `g2po evaluate`"
    require(not play.get("vllm_structured_outputs_regex"), "folder", folder, remedy)
    template = play.get("chat_template_kwargs"), play.get("generation_kwargs"), play.get("autocast")
    lengths = {name: play[name] for name in ("history_length", "max_prompt_length", "history") if name in play}
    actor = load_local(folder, *template, dtype=play.get("dtype") or "auto")
    actor = replace(actor, template=load_prompt(run["prompt"]), **lengths)
    return TrainedAgent(actor, Sampling(**{one.name: play[one.name] for one in fields(Sampling) if one.name in play}))
