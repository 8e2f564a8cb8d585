"""The official games: `python -m g2po_envs.alfworld.official` downloads them and checks that all are there.

ALFWorld's own `alfworld-download` downloads them; this module checks the result. The number of playable games of each
split is known, and so are the ids of 144 games, which are hashes of their content: this detects another version of the
data, or an incomplete download. Versions and manifests are written to `g2po_versions.json` next to the games; later
uses compare the games with this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from g2po_envs.alfworld.manifest import Manifest
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.json import write_json
from g2po_trl.utils.options import require

RELEASE = "json_2.1.1"
RECORD = "g2po_versions.json"
PREFIX = "official:"
_KNOWN = Path(__file__).with_name("official_games.json")


@dataclass(frozen=True)
class Release:
    """Description of the official games: split -> number of playable games, split -> ids of some of them."""

    numbers: Mapping[str, int]
    known: Mapping[str, list[str]]

    @classmethod
    def load(cls) -> Release:
        return cls(**json.loads(_KNOWN.read_text()))


def data_directory() -> Path:
    """Return ALFWorld's data directory: $ALFWORLD_DATA, else ~/.cache/alfworld."""
    return Path(os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser()


def official_games(split: str, directory: str | Path | None = None, release: Release | None = None) -> Manifest:
    """Return all games of a split.

    Args:
        split: `train`, or one of the evaluation sets `valid_seen` and `valid_unseen`.
        directory: ALFWorld's data directory. `None`: `data_directory()`.
        release: expected numbers and ids. `None`: the bundled ones.

    Raises:
        G2POError: for an unknown split, if the games are missing (the message contains the download command), or if
            they differ from the official or the recorded ones.
    """
    release = release or Release.load()
    require(split in release.numbers, "split", split, f"choose one of {', '.join(release.numbers)}")
    root = Path(directory) if directory else data_directory()
    folder = root / RELEASE / split
    fetch = "`python -m g2po_envs.alfworld.official` downloads the official games (2 GB), or set ALFWORLD_DATA"
    require(folder.is_dir(), "directory", str(root), f"{folder} is not there, {fetch}")
    games = Manifest.scan(folder)
    number = len(games) + games.skipped.get("the same game again", 0)
    missing = [game for game in release.known[split] if game not in games.games]
    remedy = (
        f"{folder} holds {number} playable games, officially there are {release.numbers[split]}; of "
        f"{len(release.known[split])} known ones {len(missing)} are missing. If a download was "
        "interrupted, `python -m g2po_envs.alfworld.official` continues it; to play other games, pass their folder"
    )
    require(not missing and number == release.numbers[split], "directory", str(root), remedy)
    recorded = _read_record(root).get("manifests", {}).get(split, games.hash)
    remedy = (
        f"the games of {folder} ({games.hash}) are not those that {root / RECORD} recorded ({recorded}). "
        "Download them again, or delete the record if this is intended"
    )
    require(recorded == games.hash, "directory", str(root), remedy)
    return games


def record(directory: str | Path, release: Release | None = None) -> dict:
    """Check all splits, write versions and manifests if there are none, and return them."""
    release, root = release or Release.load(), Path(directory)
    games = {split: official_games(split, root, release) for split in release.numbers}
    found = {
        "versions": {name: version(name) for name in ("alfworld", "textworld")},
        "manifests": {split: manifest.hash for split, manifest in games.items()},
    }
    if not (root / RECORD).exists():
        write_json(root / RECORD, found, indent=1)
    return {**found, "summaries": {split: manifest.summary() for split, manifest in games.items()}}


def _read_record(root: Path) -> dict:
    path = root / RECORD
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise G2POError(f"{path} cannot be read ({error}): delete it, and it is written again", RECORD) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=data_directory(), help="default: %(default)s")
    parser.add_argument("--check_only", action="store_true", help="download nothing")
    args = parser.parse_args()
    if not args.check_only:
        script = Path(sys.executable).with_name("alfworld-download")
        subprocess.run([sys.executable, str(script), "--data-dir", str(args.data_dir)], check=True)
    try:
        found = record(args.data_dir)
    except G2POError as error:
        raise SystemExit(str(error)) from error
    for split, summary in found["summaries"].items():
        print(f"{split}: {summary}")
    print(", ".join(f"{name} {number}" for name, number in found["versions"].items()))
    print(f"All there. Recorded in {args.data_dir / RECORD}")


if __name__ == "__main__":
    main()
