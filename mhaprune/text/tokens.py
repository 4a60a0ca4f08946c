"""Text -> documents -> tokens, and whether two texts share a passage.

A text is tokenized in one piece or document by document. Either way every byte of it belongs to
exactly one token, so bits per byte need no estimate, and every token knows its document.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Text:
    """A text as its documents: the whole has `joiner` between them. `source` is for people."""

    documents: tuple[str, ...]
    joiner: str
    source: str

    @property
    def whole(self) -> str:
        return self.joiner.join(self.documents)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a text.

    `num_bytes`: UTF-8 bytes of each token. Special tokens that we put in have none, so the sum is
    that of the text. `document`: index of each token's document. `hash`: sha256 of the ids as
    little-endian int64, in hex.
    """

    ids: Int[Tensor, "token"]
    num_bytes: Int[Tensor, "token"]
    document: Int[Tensor, "token"]
    hash: str


def split_documents(text: str, document_start: str | None) -> tuple[str, ...]:
    """Cut a text where `document_start` (a regular expression, MULTILINE) matches.

    Concatenated, the documents are the text. What precedes the first match is a document too,
    unless it is blank: then it belongs to the first one. Raises ValueError where the expression is
    not one, or matches nowhere.
    """
    if document_start is None:
        return (text,)
    try:
        starts = [match.start() for match in re.finditer(document_start, text, re.MULTILINE)]
    except re.error as error:
        raise ValueError(
            f"document_start={document_start!r} is not a regular expression: {error}"
        ) from error
    if not starts:
        raise ValueError(
            f"document_start={document_start!r} matches nowhere in the text; mend it, or set it to "
            f"null to take the text as one document"
        )
    if not text[: starts[0]].strip():
        starts[0] = 0
    cuts = sorted({0, *starts, len(text)})
    return tuple(text[start:stop] for start, stop in itertools.pairwise(cuts))


def split_calibration(text: Text, fraction: float) -> tuple[Text, Text]:
    """Set the last `fraction` of a text, by characters, aside: (evaluation, calibration).

    The cut is the one nearest to that place among the document boundaries or, in a text of one
    document, among the line ends. Raises ValueError where no cut leaves text on both sides.
    """
    assert 0 < fraction < 1, fraction
    by_lines = len(text.documents) == 1
    pieces = text.documents[0].splitlines(keepends=True) if by_lines else text.documents
    joiner = "" if by_lines else text.joiner
    ends = np.cumsum([len(piece) for piece in pieces])
    nearest = np.argsort(np.abs(ends[:-1] - (1 - fraction) * ends[-1]), kind="stable")
    for cut in nearest + 1:
        evaluation, calibration = pieces[:cut], pieces[cut:]
        if joiner.join(evaluation).strip() and joiner.join(calibration).strip():
            break
    else:
        raise ValueError(
            f"no part of {text.source} can be set aside for calibration: it is one "
            f"{'line' if by_lines else 'document'}; give a longer text, or another for calibration"
        )
    if by_lines:
        evaluation, calibration = ("".join(evaluation),), ("".join(calibration),)
    return (
        Text(tuple(evaluation), text.joiner, f"{text.source} (but its last {fraction:.0%})"),
        Text(tuple(calibration), text.joiner, f"{text.source} (its last {fraction:.0%})"),
    )


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    *,
    bos: bool,
    separator: Literal["none", "eos"],
) -> Tokens:
    """Tokenize a text, adding no special tokens but those asked for.

    separator "none": the whole text in one piece; a token belongs to the document of its last
    character. "eos": each document by itself, after an end-of-text token that counts as its first.
    `bos` puts one beginning-of-text token before everything. Both special tokens have 0 bytes.

    Raises ValueError where the tokenizer lacks a special token asked for or cannot tell where its
    tokens lie in the text (the slow kind), and where the text has no tokens.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens lie in the text; "
            f"use a fast tokenizer (one with a tokenizer.json)"
        )
    strings = text.documents if separator == "eos" else (text.whole,)
    opening = [_special_token(tokenizer, "eos")] if separator == "eos" else []
    ids: list[Sequence[int] | np.ndarray] = []
    num_bytes: list[Sequence[int] | np.ndarray] = []
    document: list[Sequence[int] | np.ndarray] = []
    if bos:
        ids, num_bytes, document = [[_special_token(tokenizer, "bos")]], [[0]], [[0]]
    for index, (token_ids, ends) in enumerate(_encode(tokenizer, strings)):
        ids.append([*opening, *token_ids])
        num_bytes.append([0] * len(opening))
        num_bytes.append(_byte_counts(strings[index], ends))
        if separator == "eos":
            document.append([index] * len(ids[-1]))
        else:
            document.append(_document_of(text, ends))
    return _tokens(_flat(ids), _flat(num_bytes), _flat(document), text.source)


def check_disjoint(calibration: Tokens, evaluation: Tokens, length: int = 64) -> None:
    """Raise ValueError if the calibration text holds a passage of the evaluation text.

    Passages are the evaluation text's successive chunks of `length` tokens, looked for at every
    position of the calibration text. If either text is shorter, its length is the passage's.
    """
    length = min(length, len(calibration.ids), len(evaluation.ids))
    passages = Counter(
        evaluation.ids[start : start + length].numpy().tobytes()
        for start in range(0, len(evaluation.ids) - length + 1, length)
    )
    ids = calibration.ids.numpy()
    raw, width = ids.tobytes(), ids.itemsize
    shared = {
        passage
        for start in range(len(ids) - length + 1)
        if (passage := raw[width * start : width * (start + length)]) in passages
    }
    if shared:
        num_shared = sum(passages[passage] for passage in shared)
        raise ValueError(
            f"the calibration text holds {num_shared} of the evaluation text's {passages.total()} "
            f"passages of {length} tokens; choose another dataset.calibration_split or "
            f"dataset.calibration_path, or leave both null to set a part of the text aside"
        )


def _special_token(tokenizer: PreTrainedTokenizerBase, kind: Literal["bos", "eos"]) -> int:
    token_id = getattr(tokenizer, f"{kind}_token_id")
    if token_id is None:
        setting = {"bos": "dataset.bos=false", "eos": "dataset.separator=none"}[kind]
        raise ValueError(f"the tokenizer has no {kind} token; set {setting}")
    return token_id


def _encode(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]
) -> list[tuple[list[int], Int[np.ndarray, "token"]]]:
    """Return each string's token ids and where, in characters, each token ends.

    Ends and not starts: a tokenizer that trims offsets leaves a token's leading space out of it.
    The last token ends with its string, whatever is trimmed.
    """
    encoding = tokenizer(
        list(strings),
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,  # or it warns that a text is longer than a context, which windows are for
    )
    encoded = []
    for string, ids, offsets in zip(
        strings, encoding["input_ids"], encoding["offset_mapping"], strict=True
    ):
        ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
        ends[-1:] = len(string)
        encoded.append((ids, ends))
    return encoded


def _byte_counts(string: str, ends: Int[np.ndarray, "token"]) -> Int[np.ndarray, "token"]:
    """UTF-8 bytes from each token's predecessor's end to its own: they add up to the string's."""
    code_points = np.frombuffer(string.encode("utf-32-le"), dtype="<u4")
    widths = sum((code_points >= limit).astype(np.int64) for limit in (0, 0x80, 0x800, 0x10000))
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    return np.diff(bytes_before[ends], prepend=0)


def _document_of(text: Text, ends: Int[np.ndarray, "token"]) -> Int[np.ndarray, "token"]:
    """Index of the document that each token of the whole ends in; a joiner belongs to the left."""
    lengths = [len(document) + len(text.joiner) for document in text.documents]
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])
    return np.searchsorted(starts, np.maximum(ends - 1, 0), side="right") - 1


def _flat(parts: Sequence[Sequence[int] | np.ndarray]) -> Int[np.ndarray, "token"]:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])


def _tokens(
    ids: Int[np.ndarray, "token"],
    num_bytes: Int[np.ndarray, "token"],
    document: Int[np.ndarray, "token"],
    source: str,
) -> Tokens:
    if not len(ids):
        raise ValueError(f"{source} has no tokens; give a text that is not empty")
    return Tokens(
        ids=torch.from_numpy(ids),
        num_bytes=torch.from_numpy(num_bytes),
        document=torch.from_numpy(document),
        hash=hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
    )
