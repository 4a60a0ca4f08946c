"""What each head looks at: its role on average, and its attention on one sentence; as files."""

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.model.architectures import head_shape
from mhaprune.model.attention import layer_attention
from mhaprune.model.eager import model_patterns
from mhaprune.model.heads import Head
from mhaprune.model.load import LoadedModel, max_context
from mhaprune.roles.patterns import (
    MIN_PERIOD,
    ROLES,
    PatternScores,
    measure_patterns,
    repeated_random_tokens,
    roles,
)
from mhaprune.roles.sentence import Sentence
from mhaprune.stats.effects import VERDICTS
from mhaprune.tables.csv_files import write_rows
from mhaprune.tables.files import write_atomically
from mhaprune.tables.rows import HeadEffect, HeadRole, RoleEffect
from mhaprune.text.sample import Sample
from mhaprune.text.tokens import Text, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_TOKENS = 64  # of a sentence: more would not be readable
MOST_WEIGHTS = 4_500_000  # of all heads: one byte each on a page that has to stay below 8 MB


@dataclass(frozen=True)
class Judging:
    """On what it is judged what heads attend to: windows of text (0: no roles), random rows.

    `repeats` rows of random tokens come twice each after `period` tokens, drawn by `seed`.
    """

    windows: int = 4
    repeats: int = 8
    period: int = 64
    seed: int = 0


def write_atlas(
    directory: Path,
    loaded: LoadedModel,
    sample: Sample,
    text: str,
    judging: Judging,
    say: Callable[[str], object],
) -> list[HeadRole]:
    """Write roles.csv and attention.npz, as far as the model lets; `say` gets why not.

    Returns the heads' roles, none where they were not asked for or cannot be judged.
    """
    try:
        write_sentence(directory, read_sentence(loaded, text))
    except ValueError as error:
        say(f"The attention on the sentence is left out: {error}")
    if not judging.windows:
        return []
    try:
        found = head_roles(loaded.model, sample, judging)
    except ValueError as error:
        say(f"The roles of heads are left out: {error}")
        return []
    write_rows(directory / "roles.csv", HeadRole, found)
    return found


def head_roles(model: "PreTrainedModel", sample: Sample, judging: Judging) -> list[HeadRole]:
    """Judge every head of the model on a sample and on repeated random tokens.

    The random tokens are drawn from those that the sample's text has. Raises ValueError where the
    model's context is too short for them, and as `patterns.measure_patterns`.
    """
    ids, limit = sample.ids, max_context(model)
    period = judging.period if limit is None else min(judging.period, (limit - 1) // 2)
    if period < MIN_PERIOD:
        raise ValueError(
            f"roles take a context of at least {2 * MIN_PERIOD + 1} tokens, this model's is {limit}"
        )
    generator = torch.Generator().manual_seed(judging.seed)
    repeated = repeated_random_tokens(
        ids.unique(), int(ids[0]), judging.repeats, period, generator=generator
    )
    scores = measure_patterns(model, text_rows(sample, judging.windows), repeated, period)
    return role_rows(scores)


def text_rows(sample: Sample, count: int) -> Int[Tensor, "row pos"]:
    """Return what the first windows read, cut to one length."""
    windows = sample.windows[:count]
    length = min(window.num_inputs for window in windows)
    return torch.stack([sample.ids[window.start : window.start + length] for window in windows])


def role_rows(scores: PatternScores) -> list[HeadRole]:
    """Return a row for each head: its role, if a rule gives it one, and all scores."""
    return [
        HeadRole(
            layer=layer,
            head=head,
            role=role.name if role else None,
            score=role.score if role else None,
            **{name: float(values[layer, head]) for name, values in vars(scores).items()},
        )
        for layer, in_layer in enumerate(roles(scores))
        for head, role in enumerate(in_layer)
    ]


def effects_by_role(effects: Sequence[HeadEffect], found: Sequence[HeadRole]) -> list[RoleEffect]:
    """Join roles and effects: a row for each role that occurs, the largest mean effect first."""
    role_of = {(row.layer, row.head): row.role for row in found}
    by_role: dict[str | None, list[HeadEffect]] = {}
    for effect in sorted(effects, key=lambda row: row.rank):
        by_role.setdefault(role_of.get((effect.layer, effect.head)), []).append(effect)
    rows = []
    for role, members in by_role.items():
        counts = Counter(row.verdict for row in members)
        rows.append(
            RoleEffect(
                role=role,
                num_heads=len(members),
                mean_effect_nats=float(np.mean([row.effect_nats for row in members])),
                largest_effect_nats=members[0].effect_nats,
                **{f"num_{verdict}": counts[verdict] for verdict in VERDICTS},
                heads=" ".join(str(Head(row.layer, row.head)) for row in members),
            )
        )
    return sorted(rows, key=lambda row: -row.mean_effect_nats)


def heads_by_role(found: Sequence[HeadRole]) -> dict[str, list[str]]:
    """Return for each role the names of its heads, the highest score first."""
    heads: dict[str, list[str]] = {role: [] for role in ROLES}
    with_role = [(row, row.role, row.score) for row in found]
    for row, role, _ in sorted(with_role, key=lambda one: -(one[2] or 0)):
        if role is not None:
            heads[role].append(str(Head(row.layer, row.head)))
    return heads


def read_sentence(loaded: LoadedModel, text: str, bos: bool = False) -> Sentence:
    """Tokenize a sentence and return where every head looks, on as many tokens as can be shown.

    GPT-2 goes through the written-out layer (`attention.layer_attention`), any other architecture
    through its own eager attention. Raises ValueError for a text without tokens.
    """
    model = loaded.model
    tokens = tokenize(loaded.tokenizer, Text((text,), "", "text"), bos=bos, separator="none")
    shape = head_shape(model)
    count = min(len(tokens.ids), sentence_limit(shape.num_layers * shape.num_heads))
    count = min(count, max_context(model) or count)
    names = token_names(loaded, text, tokens.ids.tolist(), tokens.num_bytes.tolist())
    note = None
    if count < len(names):
        note = f"The first {count} of {len(names)} tokens"
    return Sentence(names[:count], sentence_patterns(loaded, tokens.ids[:count]), note)


def sentence_limit(num_heads: int) -> int:
    """Return how many tokens' patterns of so many heads fit on a page: T (T + 1) / 2 bytes each."""
    fitting = int((2 * MOST_WEIGHTS / num_heads + 0.25) ** 0.5 - 0.5)
    return max(1, min(MOST_TOKENS, fitting))


def token_names(
    loaded: LoadedModel, text: str, ids: Sequence[int], num_bytes: Sequence[int]
) -> list[str]:
    """Return the tokens as pieces of the text; by the tokenizer's name where there is no text."""
    content, start, names = text.encode(), 0, []
    for token, size in zip(ids, num_bytes, strict=True):
        piece = content[start : start + size].decode(errors="replace")
        names.append(piece or str(loaded.tokenizer.convert_ids_to_tokens(token)))
        start += size
    return names


def sentence_patterns(
    loaded: LoadedModel, ids: Int[Tensor, "pos"]
) -> Float[np.ndarray, "layer head query key"]:
    """Return every head's pattern on one row of tokens."""
    model = loaded.model
    if model.config.model_type == "gpt2":
        patterns = torch.stack([layer.pattern for layer in layer_attention(model, ids[None])])
    else:
        patterns = model_patterns(model, ids[None])
    return patterns[:, 0].tril().cpu().numpy()


def write_sentence(directory: Path, sentence: Sentence) -> None:
    """Write attention.npz: tokens, note, and each weight as one byte, round(255 * weight)."""
    content = io.BytesIO()
    np.savez_compressed(
        content,
        tokens=np.array(json.dumps(sentence.tokens)),  # as JSON: an array of strings drops NULs
        weights=np.rint(255 * sentence.patterns.clip(0, 1)).astype(np.uint8),
        note=np.array(sentence.note or "", dtype=np.str_),
    )
    write_atomically(directory / "attention.npz", content.getvalue())
