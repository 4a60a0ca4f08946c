"""A pruned model in a directory that plain transformers loads, with a card that says what it is."""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from huggingface_hub import ModelCard, ModelCardData

from mhaprune.model.heads import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Form = Literal["dense", "compact"]
ROWS_AROUND = 3  # of the pruning curve, on either side of the chosen point

DENSE_NOTE = """\
The dense form has the base model's class and shape: the removed heads' rows of the output
projection are zero. It loads like the base model and is as large and as fast."""
COMPACT_NOTE = """\
The compact form has lost the removed heads' weights and their share of the KV cache. Its code is
the file `modeling_pruned.py` beside the weights; read it before you trust it. With mhaprune
installed, `import mhaprune` takes the place of `trust_remote_code=True`."""


def check_directory(directory: Path) -> None:
    """Raise ValueError unless a model can be exported there: it is empty or does not exist."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory; choose another")


def export(
    directory: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    form: Form,
    card: str,
    manifest: Mapping[str, object],
) -> None:
    """Write weights (safetensors), config, tokenizer, README.md and manifest.json; all or nothing.

    The files go to a temporary directory beside `directory` and that is renamed. `card` is the text
    of README.md (`model_card`). Raises ValueError, before anything is written, where `directory`
    holds something, the model is not of this form, or the manifest is not JSON.
    """
    directory = directory.absolute()
    check_directory(directory)
    model_type = model.config.model_type
    if model_type.startswith("mhaprune_") != (form == "compact"):
        raise ValueError(f"expected a model in {form} form, got one of type {model_type}")
    try:
        manifest_json = json.dumps(manifest, sort_keys=True, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected a manifest of plain, finite JSON values: {error}") from error
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        (temporary / "manifest.json").write_text(manifest_json, encoding="utf-8")
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_card(
    *,
    form: Form,
    base_model: str,
    weights_hash: str,
    heads: Sequence[Head],
    num_heads: int,
    ablation: str,
    protocol: str,
    curve: Sequence[Mapping[str, object]],
    chosen: int,
    healed: str | None = None,
) -> str:
    """Return the text of README.md.

    Args:
        base_model: hub id and revision, or whatever names it; `weights_hash` is of its weights.
        heads: those removed, of the base model's `num_heads`.
        ablation: what replaced them and on which text that was found.
        protocol: one line: text, context, stride, tokens.
        curve: rows of the pruning curve, all with the same columns, numbers already in units that
            the columns name; the table shows those around row `chosen`, which is this model,
            before it was healed if it was; `healed` says how and to what.
    """
    if not 0 <= chosen < len(curve):
        raise ValueError(f"expected chosen to be a row of the curve, 0 to {len(curve) - 1}")
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["pruned"]
    )
    paragraphs = [
        f"---\n{data.to_yaml()}\n---",
        f"# {base_model} without {len(heads)} of its {num_heads} attention heads",
        f"- Base model: {base_model}\n- sha256 of its weights: `{weights_hash}`\n"
        f"- Ablation: {ablation}\n- Protocol: {protocol}"
        + (f"\n- Healed by {healed}" if healed else ""),
        "## Heads removed",
        _heads_by_layer(heads),
        "## Loss around this point of the pruning curve",
        _table(curve, chosen),
        "## How to load it",
        _loading(form),
        DENSE_NOTE if form == "dense" else COMPACT_NOTE,
        "## Licence",
        f"These weights are derived from {base_model}; the base model's licence applies to them.",
    ]
    return str(ModelCard("\n\n".join(paragraphs) + "\n"))


def _heads_by_layer(heads: Sequence[Head]) -> str:
    """One line for each layer that lost heads: "- layer 4: 0, 11"."""
    layers = {head.layer: [] for head in sorted(heads)}
    for head in sorted(heads):
        layers[head.layer].append(str(head.head))
    lines = [f"- layer {layer}: {', '.join(numbers)}" for layer, numbers in layers.items()]
    return "\n".join(lines) or "None."


def _table(curve: Sequence[Mapping[str, object]], chosen: int) -> str:
    first = max(0, chosen - ROWS_AROUND)
    columns = list(curve[chosen])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for number, row in enumerate(curve[first : chosen + ROWS_AROUND + 1], start=first):
        cells = [_cell(row[column]) for column in columns]
        lines.append(" | ".join(f"**{cell}**" if number == chosen else cell for cell in cells))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _loading(form: Form) -> str:
    trust = ", trust_remote_code=True" if form == "compact" else ""
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("DIRECTORY"{trust})\n'
        'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")\n'
        "```"
    )
