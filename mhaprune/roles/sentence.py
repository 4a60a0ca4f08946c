"""A sentence and where each head looks on it, as a run's attention.npz holds it."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence's tokens, as text, and where each head looks; `note` says what was left out."""

    tokens: list[str]
    patterns: Float[np.ndarray, "layer head query key"]
    note: str | None = None


def saved_sentence(directory: Path) -> Sentence | None:
    """Read attention.npz of a run; None where the run has none. ValueError where it is damaged."""
    path = directory / "attention.npz"
    if not path.exists():
        return None
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
            tokens, note = json.loads(str(saved["tokens"])), str(saved["note"])
            return Sentence(tokens, saved["weights"] / np.float32(255), note or None)
    except (BadZipFile, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
