"""The official games: are they all there, and the same as before? Here with a small release of generated games."""

import json
import shutil

import pytest

pytest.importorskip("alfworld")

from refusals import refused

from g2po_envs.alfworld import Manifest, games
from g2po_envs.alfworld.official import RECORD, RELEASE, Release, official_games, record


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("alfworld")
    train = games.generate_games(root / RELEASE / "train", "train", 6, seed=3, size="tiny", num_workers=1)
    panel = games.generate_games(root / RELEASE / "valid_seen", "held-out", 6, seed=3, size="tiny", num_workers=1)
    known = {"train": list(train.games)[:2], "valid_seen": list(panel.games)[:1]}
    return root, Release({"train": len(train), "valid_seen": len(panel)}, known)


def change(root, release, known):
    """Change a game that the release knows, or another one."""
    train = Manifest.scan(root / RELEASE / "train")
    path = train.path(next(game for game in train.games if (game in release.known["train"]) == known))
    game = json.loads(open(path).read())
    game["pddl_problem"] += "\n"
    open(path, "w").write(json.dumps(game))


FAULTS = {
    "a missing game": lambda root, _: shutil.rmtree(next(iter((root / RELEASE / "train").glob("*")))),
    "another known game": lambda root, release: change(root, release, known=True),
    "a change after the record": lambda root, release: change(root, release, known=False),
    "no games": lambda root, _: shutil.rmtree(root / RELEASE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_there_is_recorded_once_and_every_fault_is_refused(made, tmp_path, fault):
    shutil.copytree(made[0], root := tmp_path / "data")
    release = made[1]
    found = record(root, release)
    written = json.loads((root / RECORD).read_text())
    assert written == {name: found[name] for name in ("versions", "manifests")} and record(root, release) == found
    panel = official_games("valid_seen", root, release)
    assert len(panel) == 6 and panel.hash == written["manifests"]["valid_seen"]
    FAULTS[fault](root, release)
    with refused("directory"):
        official_games("train", root, release)
    with refused("split"):
        official_games("test", root, release)


def test_what_is_known_of_the_real_release():
    release = Release.load()
    assert release.numbers == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
    assert len(release.known["train"]) == 120 and len(release.known["valid_seen"]) == 24
