"""The official games: are they all there, and the same as before? Here with a small release of generated games."""

import json
import shutil

import pytest

pytest.importorskip("alfworld")

from g2po_envs.alfworld import Manifest, games
from g2po_envs.alfworld.official import RECORD, RELEASE, Release, official_games, record


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("alfworld")
    train = games.generate_games(root / RELEASE / "train", "train", 6, seed=3, size="tiny", num_workers=1)
    panel = games.generate_games(root / RELEASE / "valid_seen", "held-out", 6, seed=3, size="tiny", num_workers=1)
    known = {"train": list(train.games)[:2], "valid_seen": list(panel.games)[:1]}
    return root, Release({"train": len(train), "valid_seen": len(panel)}, known)


@pytest.fixture
def data(made, tmp_path):
    root, release = made
    shutil.copytree(root, tmp_path / "data")
    return tmp_path / "data", release


def test_all_there_is_recorded_once_and_the_panel_is_the_whole_split(data):
    root, release = data
    found = record(root, release)
    written = json.loads((root / RECORD).read_text())
    assert written == {name: found[name] for name in ("versions", "manifests")}
    assert written["versions"]["alfworld"] == "0.4.2"
    panel = official_games("valid_seen", root, release)
    assert len(panel) == 6 and list(panel.games) == sorted(panel.games)
    assert panel.hash == written["manifests"]["valid_seen"]
    assert record(root, release) == found


def test_a_game_that_is_missing_is_told(data):
    root, release = data
    shutil.rmtree(next(iter((root / RELEASE / "train").glob("*"))))
    with pytest.raises(ValueError, match="holds 5 playable games, officially there are 6"):
        record(root, release)
    assert not (root / RECORD).exists()


def test_other_content_under_the_same_names_is_told(data):
    root, release = data
    path = Manifest.scan(root / RELEASE / "train").path(release.known["train"][0])
    game = json.loads(open(path).read())
    game["pddl_problem"] += "\n"
    open(path, "w").write(json.dumps(game))
    with pytest.raises(ValueError, match="of 2 known ones 1 are missing"):
        official_games("train", root, release)


def test_a_change_after_the_first_time_is_told(data):
    root, release = data
    record(root, release)
    unknown = [g for g in Manifest.scan(root / RELEASE / "train").games if g not in release.known["train"]]
    path = Manifest.scan(root / RELEASE / "train").path(unknown[0])
    game = json.loads(open(path).read())
    game["pddl_problem"] += "\n"
    open(path, "w").write(json.dumps(game))
    with pytest.raises(ValueError, match="were changed"):
        official_games("train", root, release)
    (root / RECORD).write_text("{")
    with pytest.raises(ValueError, match="delete it"):
        official_games("valid_seen", root, release)


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"python -m g2po_envs\.alfworld\.official"):
        official_games("train", tmp_path)
    with pytest.raises(ValueError, match="choose one of train, valid_seen, valid_unseen"):
        official_games("test", tmp_path)


def test_what_is_known_of_the_real_release():
    release = Release.load()
    assert release.numbers == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
    assert len(release.known["train"]) == 120 and len(release.known["valid_seen"]) == 24
