"""What heads attend to, as rows and as one sentence: against the scores and patterns themselves."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mhaprune.model.load import LoadedModel
from mhaprune.roles import atlas
from mhaprune.roles.atlas import (
    MOST_TOKENS,
    MOST_WEIGHTS,
    Judging,
    effects_by_role,
    head_roles,
    heads_by_role,
    read_sentence,
    role_rows,
    sentence_limit,
    text_rows,
    token_names,
    write_atlas,
    write_sentence,
)
from mhaprune.roles.patterns import PatternScores, measure_patterns, repeated_random_tokens, roles
from mhaprune.roles.sentence import saved_sentence
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.tables.csv_files import read_rows
from mhaprune.tables.rows import HeadEffect, HeadRole, RoleEffect
from mhaprune.text.tokens import Text, tokenize
from mhaprune.text.windows import Window
from tests.micro import tiny_model
from tests.tiny import END, make_config, make_place, tiny_gpt2, tiny_tokenizer

SCORES = [field.name for field in fields(PatternScores)]
TEXT = "the cat sat on the mat because it was tired"
JUDGING = Judging(windows=3, repeats=2, period=16, seed=5)
Judged = Callable[..., tuple[list[HeadRole], list[str]]]


def loaded_with(model: PreTrainedModel) -> LoadedModel:
    return LoadedModel("tiny", model, tiny_tokenizer(), "here", "hash", 1)


def llama() -> PreTrainedModel:
    """A tiny Llama that knows the tiny tokenizer's tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny_model("llama")
        model.resize_token_embeddings(300, mean_resizing=False)
    return model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A tiny GPT-2 and 6 windows of 16 tokens."""
    return prepare(make_config(make_place(tmp_path_factory.mktemp("place"))))


@pytest.fixture(scope="module")
def loaded(prepared: Prepared) -> LoadedModel:
    return prepared.loaded


# ---- roles


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_head_s_row_is_what_its_patterns_score(prepared, architecture):
    if architecture == "llama":
        prepared = replace(prepared, loaded=loaded_with(llama()))
    model, ids = prepared.loaded.model, prepared.sample.ids
    repeated = repeated_random_tokens(
        *(torch.tensor(sorted({*ids.tolist()})), int(ids[0]), 2, 16),
        generator=torch.Generator().manual_seed(5),
    )
    scores = measure_patterns(model, ids[:48].unflatten(0, (3, 16)), repeated, 16)
    rows = head_roles(model, prepared.sample, JUDGING)
    assert [(row.layer, row.head) for row in rows] == [(n // 4, n % 4) for n in range(8)]
    for row in rows:
        for name in SCORES:
            assert getattr(row, name) == getattr(scores, name)[row.layer, row.head].item(), name
        role = roles(scores)[row.layer][row.head]
        assert (row.role, row.score) == ((role.name, role.score) if role else (None, None))
    assert head_roles(model, prepared.sample, replace(JUDGING, seed=6)) != rows


def test_a_row_says_the_role_that_the_scores_give():
    table = torch.arange(9, dtype=torch.float64)[:, None, None].expand(9, 1, 3) / 100
    scores = PatternScores(**dict(zip(SCORES, table.clone(), strict=True)))
    scores.induction[0] = torch.tensor([0.0, 0.4, 0.29], dtype=torch.float64)
    scores.first_token[0] = torch.tensor([0.0, 0.9, 0.5], dtype=torch.float64)
    none, induction, sink = role_rows(scores)
    assert (none.role, none.score, none.first_token) == (None, None, 0.0)
    assert (induction.role, induction.score, induction.first_token) == ("induction", 0.4, 0.9)
    assert (sink.role, sink.score, sink.induction) == ("sink", 0.5, 0.29)
    others = {name: n / 100 for n, name in enumerate(SCORES) if name[:5] not in ("first", "induc")}
    assert others.items() <= asdict(none).items()


def test_windows_are_cut_to_the_shortest_of_them(prepared):
    windows = (Window(0, 9, 1), Window(4, 20, 5), Window(20, 23, 21))
    sample = replace(prepared.sample, windows=windows)
    ids = sample.ids
    assert torch.equal(text_rows(sample, 2), torch.stack([ids[0:8], ids[4:12]]))
    assert text_rows(sample, 9).shape == (3, 2)


@pytest.mark.parametrize(("asked", "context", "used"), [(64, 64, 31), (20, 64, 20), (64, 33, 16)])
def test_as_much_is_repeated_as_the_context_has_room_for(
    prepared, monkeypatch, asked, context, used
):
    seen: list[tuple[Any, ...]] = []

    def note(model: Any, rows: Any, repeated: Any, period: int) -> PatternScores:
        seen.append((rows.shape, repeated.shape, period))
        return measure_patterns(model, rows, repeated, period)

    monkeypatch.setattr(atlas, "measure_patterns", note)
    judging = Judging(windows=1, repeats=2, period=asked, seed=0)
    head_roles(tiny_gpt2(n_positions=context), prepared.sample, judging)
    assert seen == [((1, 16), (2, 2 * used + 1), used)]


def effect(name: str, nats: float, rank: int, verdict: str) -> HeadEffect:
    layer, head = int(name[1]), int(name[3])
    return HeadEffect(layer, head, nats, 0.0, 1.0, 9.0, 1.0, verdict, rank, 0.0, 1.0, 0.1, 4)


def role(name: str, role: str | None, score: float | None = None) -> HeadRole:
    return HeadRole(int(name[1]), int(name[3]), role, score, *(0.0,) * 9)


FOUND = [
    *(role("L0H0", "sink", 0.6), role("L0H1", None), role("L0H2", "sink", 0.8)),
    *(role("L0H3", "induction", 0.4), role("L1H0", None), role("L1H1", "sink", 0.7)),
]


def test_the_effects_of_a_role_are_those_of_its_heads():
    effects = [
        *(effect("L0H0", -0.25, 5, "harmful"), effect("L0H1", 0.125, 3, "critical")),
        *(effect("L0H2", 0.5, 1, "critical"), effect("L0H3", 0.25, 2, "useful")),
        effect("L1H0", 0.0, 4, "redundant"),
    ]  # L1H1 was not measured
    assert effects_by_role(effects, FOUND) == [
        RoleEffect("induction", 1, 0.25, 0.25, 0, 1, 0, 0, 0, "L0H3"),
        RoleEffect("sink", 2, 0.125, 0.5, 1, 0, 0, 1, 0, "L0H2 L0H0"),
        RoleEffect(None, 2, 0.0625, 0.125, 1, 0, 1, 0, 0, "L0H1 L1H0"),
    ]


def test_the_heads_of_a_role_are_named_from_the_highest_score_on():
    assert heads_by_role(FOUND) == {
        "induction": ["L0H3"],
        "duplicate token": [],
        "previous token": [],
        "current token": [],
        "sink": ["L0H2", "L1H1", "L0H0"],
    }


# ---- a sentence's tokens


def test_tokens_are_the_pieces_of_the_text_with_their_spaces(loaded):
    text = "the  cat sat\n on the mat"
    tokens = read_sentence(loaded, text).tokens
    assert "".join(tokens) == text
    assert tokens == [loaded.tokenizer.decode([i]) for i in loaded.tokenizer(text)["input_ids"]]
    assert " cat" in tokens and "\n" in tokens


def test_a_token_without_text_of_its_own_has_the_tokenizer_s_name(loaded):
    assert read_sentence(loaded, "é cat").tokens == ["é", "©", " cat"]  # bytes C3 A9
    assert read_sentence(loaded, "😀").tokens == ["😀", "Ł", "ĺ", "Ģ"]  # bytes F0 9F 98 80
    assert read_sentence(loaded, "the cat", bos=True).tokens == [END, "the", " cat"]


@given(st.text(min_size=1, max_size=20))
def test_the_pieces_of_any_text_are_the_text(text: str):
    loaded = LoadedModel("none", NO_MODEL, TOKENIZER, "here", "hash", 1)
    tokens = tokenize(TOKENIZER, Text((text,), "", "text"), bos=True, separator="none")
    sizes = tokens.num_bytes.tolist()
    names = token_names(loaded, text, tokens.ids.tolist(), sizes)
    assert "".join(name for name, size in zip(names, sizes, strict=True) if size) == text
    assert all(names)


TOKENIZER, NO_MODEL = tiny_tokenizer(), tiny_gpt2(n_layer=1, n_head=1, n_embd=2)


@given(st.integers(1, MOST_WEIGHTS))
def test_a_sentence_is_as_long_as_fits_and_no_longer(num_heads: int):
    limit = sentence_limit(num_heads)
    assert num_heads * limit * (limit + 1) // 2 <= MOST_WEIGHTS
    more = num_heads * (limit + 1) * (limit + 2) // 2
    assert limit == MOST_TOKENS or more > MOST_WEIGHTS


def test_the_limit_of_known_models():
    assert sentence_limit(12 * 12) == sentence_limit(48 * 25) == 64
    assert sentence_limit(MOST_WEIGHTS // 1225) == 49  # 49 * 50 / 2 = 1225
    assert sentence_limit(MOST_WEIGHTS) == sentence_limit(2 * MOST_WEIGHTS) == 1


@pytest.mark.parametrize(("most", "shown"), [(8 * 10, 4), (8 * 10 - 1, 3), (8 * 55, 10)])
def test_a_sentence_is_cut_where_its_weights_would_be_too_many(loaded, monkeypatch, most, shown):
    monkeypatch.setattr(atlas, "MOST_WEIGHTS", most)
    whole = [loaded.tokenizer.decode([i]) for i in loaded.tokenizer(TEXT)["input_ids"]]
    sentence = read_sentence(loaded, TEXT)
    assert sentence.tokens == whole[:shown]
    assert sentence.patterns.shape == (2, 4, shown, shown)
    cut = f"The first {shown} of {len(whole)} tokens"
    assert sentence.note == (cut if shown < len(whole) else None)


def test_a_sentence_is_cut_to_the_most_tokens_and_to_the_model_s_context(loaded):
    long = " cat" * 65
    sentence = read_sentence(loaded, long)
    assert (len(sentence.tokens), sentence.note) == (64, "The first 64 of 65 tokens")
    assert read_sentence(loaded, " cat" * 64).note is None
    short = read_sentence(loaded_with(tiny_gpt2(n_positions=8)), long)
    assert (len(short.tokens), short.note) == (8, "The first 8 of 65 tokens")


def test_a_text_without_tokens_is_refused(loaded):
    with pytest.raises(ValueError, match=r"^text has no tokens; give a text that is not empty$"):
        read_sentence(loaded, "")


# ---- a sentence's patterns


@pytest.mark.parametrize("model", [tiny_gpt2(), llama()], ids=["gpt2", "llama"])
def test_a_sentence_s_patterns_are_those_of_hugging_face_s_eager_attention(model):
    loaded = loaded_with(model)
    found = read_sentence(loaded, TEXT).patterns
    model.set_attn_implementation("eager")
    ids = loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        eager = model(ids, output_attentions=True).attentions
    assert found.shape == (2, 4, ids.shape[1], ids.shape[1])
    np.testing.assert_allclose(found, torch.cat(eager).numpy(), atol=1e-6)
    assert not np.triu(found, k=1).any()


def test_what_is_written_reads_back_to_half_a_step_and_twice_gives_the_same_bytes(loaded, tmp_path):
    sentence = replace(read_sentence(loaded, "é <b>\u2028 cat 😀"), note="a note")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_sentence(tmp_path / name, sentence)
    again = saved_sentence(tmp_path / "a")
    assert again is not None
    assert (again.tokens, again.note) == (sentence.tokens, "a note")
    assert again.patterns.dtype == np.float32
    assert np.abs(again.patterns - sentence.patterns).max() <= 1 / 510 + 1e-7
    assert not np.triu(again.patterns, k=1).any()
    first, second = ((tmp_path / name / "attention.npz").read_bytes() for name in ("a", "b"))
    assert first == second
    write_sentence(tmp_path / "b", again)  # what was read is what is written
    assert (tmp_path / "b" / "attention.npz").read_bytes() == first


def test_no_note_reads_back_as_none_and_no_file_as_no_sentence(loaded, tmp_path):
    assert saved_sentence(tmp_path) is None
    write_sentence(tmp_path, read_sentence(loaded, "the cat"))
    again = saved_sentence(tmp_path)
    assert again is not None and again.note is None


@pytest.mark.parametrize("damaged", [b"", b"damaged" * 99], ids=["empty", "other"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path, damaged):
    (tmp_path / "attention.npz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"attention\.npz"):
        saved_sentence(tmp_path)


# ---- both, as files


@pytest.fixture
def judged(prepared: Prepared, tmp_path: Path) -> Judged:
    """Write the atlas of the model; return the roles and what was said."""

    def judged(
        model: PreTrainedModel | None = None, text: str = TEXT, judging: Judging = JUDGING
    ) -> tuple[list[HeadRole], list[str]]:
        said: list[str] = []
        loaded = loaded_with(model) if model else prepared.loaded
        return write_atlas(tmp_path, loaded, prepared.sample, text, judging, said.append), said

    return judged


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_roles_and_sentence_are_written_and_read_back(judged, prepared, tmp_path):
    rows, said = judged()
    assert (rows, said) == (head_roles(prepared.loaded.model, prepared.sample, JUDGING), [])
    assert read_rows(tmp_path / "roles.csv", HeadRole) == rows
    sentence = saved_sentence(tmp_path)
    assert sentence is not None and "".join(sentence.tokens) == TEXT


def test_a_context_too_short_for_roles_is_said_and_leaves_the_sentence(judged, tmp_path):
    assert judged(tiny_gpt2(n_positions=32)) == (
        [],
        [
            "The roles of heads are left out: roles take a context of at least 33 tokens, this "
            "model's is 32"
        ],
    )
    assert files_in(tmp_path) == {"attention.npz"}
    rows, said = judged(tiny_gpt2(n_positions=33))
    assert (len(rows), said) == (8, [])


def test_no_windows_mean_no_roles_and_no_word_about_it(judged, tmp_path):
    assert judged(judging=Judging(windows=0)) == ([], [])
    assert files_in(tmp_path) == {"attention.npz"}


def test_a_text_without_tokens_is_said_and_nothing_is_shown(judged, tmp_path):
    _, said = judged(text="")
    assert said == [
        "The attention on the sentence is left out: text has no tokens; "
        "give a text that is not empty"
    ]
    assert "attention.npz" not in files_in(tmp_path)
