"""Models from the hub or the disk; nothing else in the library loads any.

Weights come from safetensors (or GGUF) files only, and no code comes with them.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from mhaprune.text.hub import fetch, first_line, missing_files, quiet

DEMO_MODEL_DIR = Path(__file__).resolve().parent / "demo_model"
MODEL_FILES = ("config.json", "*.safetensors")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured: in eval mode, without gradients, on its device.

    `weights_hash`: see `hash_weights`. `source`: hub id and revision, or the directory.
    """

    name: str
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    source: str
    weights_hash: str
    num_parameters: int


def load_model(
    name: str,
    *,
    hub_id: str | None,
    revision: str | None,
    path: str | None,
    gguf_file: str | None,
    dtype: Literal["float32", "float64", "bfloat16"],
    device: Literal["auto", "cpu", "cuda", "mps"],
) -> LoadedModel:
    """Load a decoder and its tokenizer: from the hub, from a directory or, named "demo", our own.

    `gguf_file` names a file in there whose weights are dequantized. Raises ValueError for a model
    that is not named, out of reach or not whole, and for a device that cannot be used.
    """
    usable_device = _choose_device(device, dtype)
    needed = (gguf_file,) if gguf_file else MODEL_FILES
    directory, source = _find_model(name, hub_id, revision, path, needed)
    _check_model_files(directory, needed)
    model, tokenizer = _read_model(directory, gguf_file, getattr(torch, dtype), usable_device)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        source=source,
        weights_hash=hash_weights(model),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def hash_weights(model: torch.nn.Module) -> str:
    """sha256, in hex, of the state dict in order of name: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def max_context(model: transformers.PreTrainedModel) -> int | None:
    """Return how many tokens the model can read at once; None where its config does not say."""
    for key in ("max_position_embeddings", "n_positions"):
        if (positions := getattr(model.config, key, None)) is not None:
            return positions
    return None


def _choose_device(device: str, dtype: str) -> torch.device:
    usable = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and dtype != "float64",
        "cpu": True,
    }
    if device == "auto":
        device = next(name for name in usable if usable[name])
    if not usable[device]:
        raise ValueError(f"model.device={device} cannot be used here with {dtype}; use auto or cpu")
    return torch.device(device)


def _find_model(
    name: str, hub_id: str | None, revision: str | None, path: str | None, needed: Sequence[str]
) -> tuple[Path, str]:
    """Return the model's directory, fetched from the hub if need be, and its source."""
    if hub_id and path:
        raise ValueError(f"model.hub_id={hub_id} and model.path={path} are both set; drop one")
    if path:
        return Path(path), path
    if hub_id:
        if revision is None:
            raise ValueError(f"model.hub_id={hub_id} needs model.revision, the commit to load")
        return fetch("model", hub_id, revision, needed), f"{hub_id}@{revision}"
    if name == "demo":
        return DEMO_MODEL_DIR, "demo"
    raise ValueError(f"model {name} has neither hub_id (with revision) nor path; set one")


def _check_model_files(directory: Path, needed: Sequence[str]) -> None:
    """Raise ValueError unless the directory holds weights of a kind that we load and can read."""
    if missing := missing_files(directory, needed):
        raise ValueError(
            f"{directory} has no {' and no '.join(missing)} (a pickled pytorch_model.bin can run "
            f"code and is never loaded: save the model again with save_pretrained)"
        )
    absent = [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]
    if needed != MODEL_FILES and absent:
        raise ValueError(f"{needed[0]} takes {' and '.join(absent)}: pip install 'mhaprune[gguf]'")


def _read_model(
    directory: Path, gguf_file: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Read model and tokenizer, running no code of theirs; ValueError where they are not whole."""
    options = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file:
        options |= {"gguf_file": gguf_file}
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
    except Exception as error:  # of any kind: a broken file fails wherever it is first noticed
        raise ValueError(f"cannot load the model in {directory}: {first_line(error)}") from error
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers and carries on
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lacking:
        raise ValueError(
            f"the weights in {directory} do not fit its config.json: {len(lacking)} are missing or "
            f"of another shape, {lacking[0]} the first"
        )
    return model.eval().requires_grad_(False).to(device), tokenizer
