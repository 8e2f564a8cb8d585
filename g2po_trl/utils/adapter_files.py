"""Find adapters in folders, as PEFT saves them. Standard library only."""

from __future__ import annotations

from pathlib import Path

from .errors import G2POError

ADAPTER_CONFIG = "adapter_config.json"


def adapters_below(folder: str | Path) -> list[Path]:
    """Return the subfolders that hold an adapter; of a run, without its checkpoints."""
    found = (path.parent for path in sorted(Path(folder).glob(f"[!.]*/{ADAPTER_CONFIG}")))
    return [path for path in found if not (path / "trainer_state.json").is_file()]


def find_adapter(folder: str | Path) -> Path | None:
    """Return the folder that holds the adapter of a model's folder; `None` if there is none.

    PEFT saves the adapter "default" in the folder itself, and one of another name in a subfolder of that name.

    Raises:
        G2POError: if several subfolders hold one.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    found = [] if (folder / "config.json").is_file() else adapters_below(folder)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise G2POError(f"{folder} holds several adapters ({names}): pass the folder of one of them")
    return found[0] if found else None
