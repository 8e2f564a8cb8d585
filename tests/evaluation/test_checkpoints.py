"""An evaluation's numbers belong to weights, wherever they are."""

from g2po_trl.evaluation.checkpoints import files_hash, weights_hash


def test_weights_are_those_of_the_model_and_not_of_its_run(tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    before = weights_hash(str(tmp_path))
    for name in ("critic.safetensors", "step_samples_0.safetensors", "run.json", "trainer_state.json"):
        (tmp_path / name).write_text("{}")
    assert weights_hash(str(tmp_path)) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("[]")
        assert weights_hash(str(tmp_path)) != before
        (tmp_path / name).write_text("{}")
    assert files_hash([tmp_path / "config.json"]) != files_hash([tmp_path / "run.json"])
