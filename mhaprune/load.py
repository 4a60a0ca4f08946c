"""Models and texts from the hub or the disk; nothing else in the library reads either.

The hub is asked only for what its cache lacks, and only once it has answered a short question:
without a network its own calls hang for most of a minute, while here a run stops within seconds and
says what to do. Weights come from safetensors (or GGUF) files only, and no code comes with them.
"""

import contextlib
import fnmatch
import hashlib
import importlib.util
import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from mhaprune.text import Text, split_documents

DEMO_MODEL_DIR = Path(__file__).resolve().parent / "demo_model"
MODEL_FILES = ("config.json", "*.safetensors")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model")
HUB_ANSWER_SECONDS = 3.0


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


def load_text_file(path: str, *, document_start: str | None) -> Text:
    """Read a UTF-8 text file, byte for byte; documents begin where `document_start` matches.

    Raises ValueError where it cannot be read (no file, a directory), is not UTF-8, or is blank.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"expected a text file at {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); convert it") from error
    return _text(text, document_start, source=path)


def load_hub_text(
    hub_id: str,
    config_name: str | None,
    split: str,
    column: str,
    revision: str | None,
    joiner: str,
    *,
    document_start: str | None,
) -> Text:
    """Load a data set's split and join the rows of its text column by `joiner`.

    Rows are not documents (WikiText's are lines): documents begin where `document_start` matches
    the joined text. `config_name` is the repository's folder that holds the files, `split` a part
    of their paths; only these files are fetched. Raises ValueError where any of it is out of reach.
    """
    if revision is None:
        raise ValueError(f"dataset.hub_id={hub_id} needs dataset.revision, the commit to load")
    pattern = f"{config_name}/*{split}*" if config_name else f"*{split}*"
    directory = _hub_directory("dataset", hub_id, revision, (pattern,))
    rows = _read_column(directory / (config_name or ""), split, column, hub_id)
    return _text(joiner.join(rows), document_start, source=f"{hub_id}@{revision} {pattern}")


def _text(text: str, document_start: str | None, source: str) -> Text:
    if not text.strip():
        raise ValueError(f"{source} has no text in it")
    return Text(split_documents(text, document_start), joiner="", source=source)


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
        return _hub_directory("model", hub_id, revision, needed), f"{hub_id}@{revision}"
    if name == "demo":
        return DEMO_MODEL_DIR, "demo"
    raise ValueError(f"model {name} has neither hub_id (with revision) nor path; set one")


def _check_model_files(directory: Path, needed: Sequence[str]) -> None:
    """Raise ValueError unless the directory holds weights of a kind that we load and can read."""
    if missing := _missing(directory, needed):
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
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
    except Exception as error:  # of any kind: a broken file fails wherever it is first noticed
        raise ValueError(f"cannot load the model in {directory}: {_first_line(error)}") from error
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers and carries on
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lacking:
        raise ValueError(
            f"the weights in {directory} do not fit its config.json: {len(lacking)} are missing or "
            f"of another shape, {lacking[0]} the first"
        )
    return model.eval().requires_grad_(False).to(device), tokenizer


def _read_column(directory: Path, split: str, column: str, hub_id: str) -> list[str]:
    """Return a column of the split whose data files lie in the directory."""
    import datasets  # takes a second to import, and only texts from the hub need it

    try:
        with _quiet():
            data = datasets.load_dataset(str(directory), split=split)
    except Exception as error:  # each file format has its own
        raise ValueError(f"cannot read {hub_id}, split {split}: {_first_line(error)}") from error
    assert isinstance(data, datasets.Dataset)
    rows: list[Any] = list(data[column]) if column in data.column_names else [None]
    if not all(isinstance(row, str) for row in rows):
        names = ", ".join(data.column_names)
        raise ValueError(f"{hub_id} has no column {column} of text; dataset.column can be {names}")
    return rows


def _hub_directory(
    kind: Literal["model", "dataset"], hub_id: str, revision: str, needed: Sequence[str]
) -> Path:
    """Return a hub repository's local copy, downloading what the cache lacks.

    Raises ValueError, saying what to do, unless each pattern in `needed` matches a file of it.
    """
    patterns = [*needed, *(TOKENIZER_FILES if kind == "model" else ())]
    request = {"repo_type": kind, "revision": revision, "allow_patterns": patterns}
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(hub_id, local_files_only=True, **request))
        if not _missing(cached, needed):
            return cached
    if problem := _hub_problem():
        raise ValueError(_out_of_reach(kind, hub_id, revision, patterns, problem))
    try:
        fetched = Path(snapshot_download(hub_id, **request))
    except Exception as error:  # of several libraries, and none is for us to mend
        raise ValueError(f"cannot download {hub_id}@{revision}: {_first_line(error)}") from error
    if missing := _missing(fetched, needed):
        raise ValueError(f"{hub_id}@{revision} has no {' and no '.join(missing)}")
    return fetched


def _missing(directory: Path, patterns: Sequence[str]) -> list[str]:
    files = [file.relative_to(directory).as_posix() for file in directory.rglob("*")]
    return [pattern for pattern in patterns if not fnmatch.filter(files, pattern)]


def _hub_problem() -> str | None:
    """Return why the hub cannot be asked now, or None if it answers.

    Asked through the hub library's own session, for its proxies and certificates, and from a
    thread, as no timeout covers the look-up of a name.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    problems = [f"no answer within {HUB_ANSWER_SECONDS:g} s"]

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=HUB_ANSWER_SECONDS).status_code
            problems.append(f"it answered {status}" if status >= 500 else "")
        except Exception as error:  # whatever it is, the hub is out of reach
            problems.append(_first_line(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_ANSWER_SECONDS + 1)
    return problems[-1] or None


def _out_of_reach(kind: str, hub_id: str, revision: str, patterns: list[str], problem: str) -> str:
    options = f"--repo-type {kind} --revision {revision}"
    includes = " ".join(f"--include '{pattern}'" for pattern in patterns)
    local = {"model": "model=local model.path=DIR", "dataset": "dataset=text dataset.path=FILE"}
    return (
        f"{kind} {hub_id} at revision {revision} is neither in the cache {constants.HF_HUB_CACHE} "
        f"nor within reach at {constants.ENDPOINT} ({problem}); where there is a network run "
        f"`hf download {hub_id} {options} {includes}` and copy that cache here, or set "
        f"{local[kind]}; `make demo` needs no network"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back progress bars, which all write to stderr, and transformers' warnings."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
