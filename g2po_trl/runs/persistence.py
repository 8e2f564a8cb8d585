"""What outlives the process: checkpoints that are complete or not there, exact resumption, pushes to the Hub."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from torch.utils.data import Sampler
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from ..environments.tasks import tasks_hash
from .checkpoint import STAGING, check_same_run, clear_staging, find_checkpoint, load_rollout_state, save_rollout_state

logger = logging.getLogger(__name__)

# Not for the Hub: every prompt and reply of a run, the tasks it is judged by, and checkpoints.
_NOT_PUSHED = ("trajectories/", "panels/", f"{STAGING}/", "checkpoint-*/")
_REFUSED_BY_HUB = (400, 401, 403, 404)


class HubError(RuntimeError):
    """The Hub did not take the model. It is on disk, and the message says where and what to do."""


class TaskSampler(RepeatSampler):
    """TRL's order of tasks, but the order of an epoch depends on the seed and the epoch alone.

    TRL draws it from a generator that a resumed run would start anew: the first epoch's order again.
    """

    def __init__(self, *args, epoch: Callable[[], int], **kwargs):
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch())
        return super().__iter__()


class PersistentTrainer(GRPOTrainer):
    """`GRPOTrainer` whose runs can be killed, continued and published. What is to be kept, a subclass says."""

    _writing_checkpoint = False
    hub_model_id: str | None = None
    push_in_progress = None

    def rollout_state(self) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        """State to keep (JSON) and micro-batches that are still to be trained on."""
        raise NotImplementedError

    def restore_rollout_state(self, state: dict[str, Any], slices: list[list[dict[str, Any]]]) -> None:
        """Take up what `rollout_state` gave."""
        raise NotImplementedError

    def save_more(self, folder: str) -> None:
        """Write what a checkpoint must hold besides; called on the main process."""

    def load_more(self, folder: str) -> None:
        """Take up what `save_more` wrote; called on every process."""

    def write_run(self) -> None:
        """Write down how the run is made; called on the main process before it trains."""

    def run_identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued."""
        args = self.args
        names = ("seed", "num_generations", "generation_batch_size", "steps_per_generation", "num_iterations")
        identity = {name: getattr(args, name) for name in (*names, "gradient_accumulation_steps", "shuffle_dataset")}
        return identity | {"training tasks (hash)": self._tasks_hash}

    @cached_property
    def _tasks_hash(self) -> str:
        return tasks_hash(self.train_dataset)

    # -- resuming --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """Train, from the start or from a checkpoint: a folder, `True` or "latest", or "auto" (if there is one)."""
        if self.is_world_process_zero():
            clear_staging(self.args.output_dir)
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            state, slices = load_rollout_state(checkpoint, self.args.process_index)
            check_same_run(state.pop("run"), self.run_identity(), checkpoint)
            if state.pop("buffered") and state.pop("num_processes") != self.args.world_size:
                raise ValueError(
                    f"{checkpoint!r} was made in the middle of an iteration, with step samples of other processes "
                    "than there are now: resume with as many, or from a checkpoint between two iterations"
                )
            self.restore_rollout_state(state, slices)
            self.load_more(checkpoint)
            if self.is_world_process_zero():
                print(f"Resuming from {checkpoint}", flush=True)
        if self.is_world_process_zero():
            self.write_run()
        if checkpoint is not None:
            finished = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            if 0 < self.args.max_steps <= finished.global_step:  # transformers would make one more step
                return self._take_up_finished_run(checkpoint, finished)
        return super().train(resume_from_checkpoint=checkpoint, **kwargs)

    def _take_up_finished_run(self, checkpoint: str, state: TrainerState) -> TrainOutput:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"{checkpoint!r} is the end of its run (step {state.global_step}, max_steps={self.args.max_steps}): "
                "there is nothing left to train. Use its model, or raise max_steps."
            )
        self._load_from_checkpoint(checkpoint)
        self.state = state
        return TrainOutput(state.global_step, 0.0, {})

    def _get_train_sampler(self, dataset=None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        return TaskSampler(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._writing_checkpoint else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Save into a folder apart, and rename it when all ranks are done: a kill leaves no half checkpoint."""
        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged, final = run_dir / STAGING / name, run_dir / name
        self._writing_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writing_checkpoint = False
        state, slices = self.rollout_state()
        state |= {"run": self.run_identity(), "num_processes": self.args.world_size, "buffered": bool(slices)}
        save_rollout_state(staged, state, slices, self.args.process_index, self.args.should_save)
        if self.args.should_save:
            self.save_more(str(staged))
        if self.state.best_model_checkpoint and Path(self.state.best_model_checkpoint) == staged:
            self.state.best_model_checkpoint = str(final)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(staged / "trainer_state.json"))
            shutil.rmtree(final, ignore_errors=True)
            os.rename(staged, final)
            clear_staging(run_dir)
            rotate_checkpoints(
                str(run_dir), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    # -- the Hub ---------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository. A wrong name or token stops the run now; a Hub that does not answer does not.

        Raises:
            HubError: when the Hub refuses.
        """
        try:
            super().init_hf_repo(token, private)
        except Exception as error:  # of the Hub and of the way to it: passed on, or told and tried again at each push
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, (HFValidationError, LocalTokenNotFoundError)) or status in _REFUSED_BY_HUB:
                raise HubError(
                    f"the Hub refuses {self.args.hub_model_id or Path(self.args.output_dir).name!r}: {error}. Set "
                    "hub_model_id, log in with `hf auth login`, or set push_to_hub=False."
                ) from error
            logger.warning(
                f"The Hub does not answer ({_first_line(error)}); trying again when there is something to push."
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing_checkpoint:  # the folder will have another name when it is uploaded
            return
        jobs = self.push_in_progress.jobs if self.push_in_progress is not None else []
        for error in [job.exception() for job in jobs if job.done() and job.exception()]:
            logger.warning(f"A push to the Hub failed ({_first_line(error)}); the next one brings what it missed.")
        if self.hub_model_id is None:
            self.init_hf_repo()
        if self.hub_model_id is None and self.is_world_process_zero():
            return
        self._write_gitignore()
        super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer. Unlike transformers' it never pushes: saving must not fail for the Hub's sake."""
        super().save_model(output_dir, _internal_call=True)

    def push_to_hub(self, *args, **kwargs):
        """Save the model to `output_dir` and upload it with its card.

        Raises:
            HubError: when the Hub does not take it; the model then is in `output_dir`.
        """
        try:
            if self.hub_model_id is None:
                super().init_hf_repo(kwargs.get("token"), kwargs.get("private"))
            self._write_gitignore()
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            folder = self.args.output_dir
            if not any(Path(folder).glob("*.safetensors")):  # it was the Hub's answer before the model was saved
                self.save_model(folder)
            raise HubError(
                f"the model was not pushed to the Hub: {_first_line(error)}\nIt is in {folder!r}. To push it later:\n"
                f"    hf upload {self.hub_model_id or self.args.hub_model_id or Path(folder).name} {folder} "
                f"--exclude 'trajectories/*' --exclude 'panels/*' --exclude 'checkpoint-*'"
            ) from error

    def _write_gitignore(self) -> None:
        if self.is_world_process_zero():
            Path(self.args.output_dir, ".gitignore").write_text("".join(f"{name}\n" for name in _NOT_PUSHED))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
