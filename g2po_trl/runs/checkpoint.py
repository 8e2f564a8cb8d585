"""Checkpoints from which a run continues as if it had never stopped.

transformers saves model, optimizer, scheduler and random state; this module adds the state of an agent run. A
checkpoint is written into `STAGING` and gets its name when it is complete, so every `checkpoint-…` can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import TrainerState

from ..engines.adapter_weights import Gather, plain_name, whole
from ..utils.errors import G2POError
from ..utils.images import read_png
from ..utils.json import write_json
from ..utils.options import require
from .ownership import STAGING, checkpoints_in, note_written, read_description, remove

STATE, _DIGESTS = "g2po_state.json", "file_digests.json"
_WEIGHTS = (".safetensors", ".bin")
_OF_DISK = r"StreamWriter|inline_container|\(os error \d+\)"
_TENSOR = "<tensor>"  # in step samples: a tensor of the file by its number


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str | Path) -> str | None:
    """Return the folder to resume from; `None` to start from scratch.

    `resume_from_checkpoint`: a folder; `True` or "latest": the newest in `output_dir`; "auto": the newest, if any.
    """
    wanted, existing = str(resume_from_checkpoint).lower(), checkpoints_in(output_dir)
    if wanted in ("none", "false", "") or (wanted == "auto" and not existing):
        return None
    newest = existing[-1] if existing else Path(output_dir)
    folder = newest if wanted in ("true", "latest", "auto") else Path(resume_from_checkpoint)
    remedy = f"{folder} is no checkpoint with a trainer_state.json; pass one, or 'auto' to resume if there is one"
    require((folder / "trainer_state.json").is_file(), "resume_from_checkpoint", resume_from_checkpoint, remedy)
    return str(folder)


def check_files(folder: Path) -> None:
    """Refuse a checkpoint with a file that is missing, cut or changed, before anything is loaded."""
    damaged = [name for name, digest in read_description(folder, _DIGESTS).items() if _digest(folder / name) != digest]
    others = [str(one) for one in checkpoints_in(folder.parent) if one.name != folder.name] or ["another"]
    remedy = f"{', '.join(damaged[:3])} in it is missing or damaged; restore it, or pass {others[-1]}"
    require(not damaged, "resume_from_checkpoint", str(folder), remedy)


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


class RunState:
    """Saves and restores the `parts` of a run, by name, that have `state_dict` and `load_state_dict` (JSON, no NaN).

    Those in `kept_in_files` have files of their own: `save(folder)`, on the main process, and `load(folder)`.
    """

    def __init__(self, parts: Mapping[str, Any], rank: int = 0, num_ranks: int = 1):
        self.parts, self.num_ranks = parts, num_ranks
        self.step_samples = f"step_samples_{rank}.safetensors"
        self.kept_in_files: list[Any] = []

    def save(
        self, folder: Path, identity: Mapping, mini_batches: Sequence = (), is_main: bool = True, run_id: str = ""
    ) -> None:
        """Write the states of all parts, and `mini_batches` still to be trained, into a checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if mini_batches:
            _save_step_samples(folder / self.step_samples, mini_batches)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"run": identity, "run_id": run_id, "num_processes": self.num_ranks, "buffered": bool(mini_batches)}
        if is_main:
            write_json(folder / STATE, state, indent=1)
            for part in self.kept_in_files:
                part.save(folder)

    def restore(self, folder: Path, identity: Mapping[str, Any], trains: bool = False) -> list[list[dict[str, Any]]]:
        """Restore a checkpoint of this run, and return the micro-batches that are still to be trained.

        `trains`: it needs the optimizer's state. Raises `G2POError` if it lacks it, or is another trainer's,
        version's or setting's.
        """

        def check(condition: bool, reason: str) -> None:
            remedy = f"it cannot be continued, since it {reason}, or start a new run from its weights (--model)"
            require(condition, "resume_from_checkpoint", str(folder), remedy)

        has_optimizer = any(folder.glob("rng_state*.pth"))
        check(has_optimizer or not trains, "has no optimizer state. Save with save_only_model=False")
        check((folder / STATE).is_file(), f"has no {STATE} of a G2POTrainer: pass another")
        state = read_description(folder, STATE)
        before = {name: value for name, value in state["run"].items() if value != identity.get(name, value)}
        changed = [f"{name} was {value!r} and is {identity[name]!r}" for name, value in before.items()]
        check(not changed, f"has other settings: {'; '.join(changed)}. Use these")
        then, path = state["num_processes"], folder / self.step_samples
        fits = not state["buffered"] or then == self.num_ranks
        check(fits, f"was saved in the middle of an iteration with {then} processes. Use as many")
        try:
            mini_batches = _load_step_samples(path) if path.is_file() else []
            for name in (name for name in self.parts if name in state):  # a sharded reference has none
                self.parts[name].load_state_dict(state[name])
        except (KeyError, TypeError) as error:
            check(False, f"was saved by another version of g2po-trl ({error!r}). Use that version")
        for part in self.kept_in_files:
            part.load(folder)
        return mini_batches


def _save_step_samples(path: Path, mini_batches: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write micro-batches as safetensors: a checkpoint may come from another machine, and nothing is unpickled."""
    shown = [row for part in mini_batches for micro_batch in part for row in micro_batch.get("images", ())]
    tensors = {image: torch.frombuffer(bytearray(image.png), dtype=torch.uint8) for row in shown for image in row}

    def numbered(tensor: torch.Tensor) -> dict[str, str]:
        tensors[number := str(len(tensors))] = tensor.detach().cpu().contiguous().clone()
        return {_TENSOR: number}

    described = json.dumps(mini_batches, default=numbered)  # an image is the text of its hash
    save_file(tensors, path, metadata={"micro_batches": described})


def _load_step_samples(path: Path) -> list[list[dict[str, Any]]]:
    with safe_open(path, framework="pt") as file:

        def read(data: dict[str, Any]) -> Any:
            if _TENSOR in data:
                return file.get_tensor(data[_TENSOR])
            for row in data.get("images", ()):
                row[:] = [read_png(file.get_tensor(image).numpy().tobytes()) for image in row]
            return data

        return json.loads(file.metadata()["micro_batches"], object_hook=read)


class AtomicCheckpoint:
    """The place where a checkpoint is written before it gets its name: a kill leaves no partial checkpoint."""

    is_open = False

    def folder(self, run_dir: str) -> str:
        """Return the folder to write into instead."""
        return os.path.join(run_dir, STAGING) if self.is_open else run_dir

    @contextmanager
    def model_files(self, folder: Path, is_main: bool, wait: Callable[[], None]) -> Iterator[Path]:
        """Yield a folder to write a model into: that of the open checkpoint, or one whose files are then moved.

        Weights are moved last, and after them their index. `wait` waits for the other ranks if they write, too.
        """
        if self.is_open:
            yield folder
            return
        apart = folder / STAGING / "model"
        if is_main:
            shutil.rmtree(apart, ignore_errors=True)
            apart.mkdir(parents=True)
        wait()
        with _removed_on_failure(apart):
            yield apart
        wait()
        if not is_main:
            return
        (apart / "README.md").unlink(missing_ok=True)  # PEFT's, without a word about the run
        moved = sorted(apart.iterdir(), key=lambda path: (path.name.endswith(".index.json"), path.suffix in _WEIGHTS))
        note_written(folder, *(path.name for path in moved))
        for path in moved:
            if (folder / path.name).is_dir():
                remove(folder / path.name)
            os.replace(path, folder / path.name)
        shutil.rmtree(folder / STAGING, ignore_errors=True)

    @contextmanager
    def checkpoint(self, run_dir: Path, state: TrainerState, accelerator: Accelerator, args: Any) -> Iterator[Path]:
        """Yield the folder to write a checkpoint into, on every rank. It gets its name when all ranks are done."""
        name = f"checkpoint-{state.global_step}"
        staged, final = run_dir / STAGING / name, run_dir / name
        self.is_open = True
        try:
            with _removed_on_failure(staged):
                yield staged
                if Path(state.best_model_checkpoint or run_dir) == staged:
                    state.best_model_checkpoint = str(final)
                accelerator.wait_for_everyone()
                if args.should_save:
                    state.save_to_json(str(staged / "trainer_state.json"))
                    files = [path for path in staged.rglob("*") if path.is_file()]
                    write_json(staged / _DIGESTS, {str(path.relative_to(staged)): _digest(path) for path in files})
        finally:
            self.is_open = False
        if args.should_save:
            note_written(run_dir, name)
            remove(final)
            os.rename(staged, final)
            shutil.rmtree(run_dir / STAGING, ignore_errors=True)
            found, limit = checkpoints_in(run_dir), args.save_total_limit or 0  # by step: the clock may go back
            kept = {found[-1], Path(state.best_model_checkpoint or found[-1])}  # as transformers does
            surplus = len(found) - max(limit, len(kept)) if limit > 0 else 0
            for checkpoint in [path for path in found if path not in kept][: max(0, surplus)]:
                remove(checkpoint)
        accelerator.wait_for_everyone()


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Free the disk if a model or checkpoint cannot be written, and raise an error of one line."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        # Those of torch.save and of tokenizers have no class.
        of_disk = isinstance(error, (OSError, SafetensorError)) or re.search(_OF_DISK, str(error))
        if not of_disk:
            raise
        run_dir = str(folder.parent.parent)
        message = f"output_dir is {run_dir!r}: {folder.name} cannot be written there ({error}): free space"
        raise G2POError(message, "output_dir", run_dir) from error


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Load a checkpoint's weights into a model, by the conversion from the Hub's names to the model's."""
    is_mixed = len({weight.dtype for weight in model.parameters()}) > 1  # such as a float32 head over bfloat16
    loaded = type(model).from_pretrained(str(folder), dtype=torch.float32 if is_mixed else model.dtype)
    model.load_state_dict(loaded.state_dict())


class WeightCheck(TrainerCallback):
    """Compares a model that was loaded with its checkpoint, parameter by parameter, before it trains or is used.

    `model` returns it without wrappers. `gather` gathers what ZeRO-3 shards, `device` what FSDP2 offloads to the host.
    """

    def __init__(self, model: Callable[[], torch.nn.Module], gather: Gather = nullcontext, device: Any = None):
        self.model, self.gather, self.device = model, gather, device
        self._frozen: dict[str, str] = {}  # weights that do not train are read once
        self._wanted: Mapping[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """Return a digest of each parameter's numbers, the same however it is sharded. All ranks call it together."""
        trained = {}
        for name, parameter in self.model().named_parameters():
            digests, name = trained if parameter.requires_grad else self._frozen, plain_name(name)
            if name not in digests:
                with self.gather([parameter]):
                    numbers = whole(parameter.data, self.device).cpu().contiguous().view(-1)
                    # In one dtype: a quantized layer casts its bias to the dtype that it computes in.
                    numbers = numbers.float() if numbers.is_floating_point() else numbers
                    digests[name] = xxhash.xxh3_64_hexdigest(numbers.view(torch.uint8).numpy())
        return self._frozen | trained

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Compare the model with these digests when training begins."""
        self._wanted = state

    def on_train_begin(self, args, state, control, **kwargs):
        wanted, self._wanted = self._wanted, {}
        self._compare(wanted, args.resume_from_checkpoint or args.output_dir)

    def check(self, folder: str | Path) -> None:
        """Refuse the model unless it has the digests in a checkpoint. All ranks call it together."""
        self._compare(read_description(folder, STATE).get("digests", {}), folder)

    def _compare(self, wanted: Mapping[str, str], folder: str | Path) -> None:
        self._frozen = {}
        found = self.state_dict() if wanted else {}
        differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        which = f"{len(differing)} of {len(wanted)} parameters ({', '.join(differing[:3])})"
        remedy = f"{which} are not those of then: use its files, base model and version of transformers"
        require(not differing, "resume_from_checkpoint", str(folder), remedy)
