"""An evaluation's numbers belong to weights, tasks and data, wherever they are."""

from g2po_trl.evaluation.fingerprint import fingerprint_files, fingerprint_weights, without_folders


def test_a_place_is_no_part_of_it(tmp_path):
    (tmp_path / "words.txt").write_text("a b")
    described = without_folders({"game": f"{tmp_path}/game.py:Game", "words": [str(tmp_path / "words.txt")]})
    assert described["game"] == "game.py:Game" and described["words"][0].startswith("words.txt (")
    (tmp_path / "words.txt").write_text("c")
    assert without_folders({"game": "game.py:Game", "words": [str(tmp_path / "words.txt")]}) != described
    assert without_folders("/nowhere") == "/nowhere" and without_folders(3) == 3


def test_weights_are_those_of_the_model_and_not_of_its_run(tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    before = fingerprint_weights(str(tmp_path))
    for name in ("critic.safetensors", "step_samples_0.safetensors", "run.json", "trainer_state.json"):
        (tmp_path / name).write_text("{}")
    assert fingerprint_weights(str(tmp_path)) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("[]")
        assert fingerprint_weights(str(tmp_path)) != before
        (tmp_path / name).write_text("{}")
    assert fingerprint_files([tmp_path / "config.json"]) != fingerprint_files([tmp_path / "run.json"])
