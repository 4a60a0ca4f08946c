import json
import re
import shutil
import socket
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers.processors import ByteLevel

from mhaprune.model import load
from mhaprune.model.load import hash_weights, load_model, max_context
from mhaprune.text import hub
from mhaprune.text.load import load_hub_text, load_text_file
from mhaprune.text.tokens import (
    Text,
    Tokens,
    check_disjoint,
    split_calibration,
    split_documents,
    tokenize,
)
from tests.tiny import END, tiny_gpt2, tiny_tokenizer

REVISION = "0123456789abcdef0123456789abcdef01234567"
MULTI_BYTE = "naïve – 你好 🙂"  # noqa: RUF001
ARTICLES = "\n = One = \n\n = = Part = = \nfirst .\n = Two = \nsecond .\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A model's directory as `save_pretrained` leaves it. Tests that change it work on a copy."""
    directory = tmp_path_factory.mktemp("saved")
    tiny_gpt2().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that is not to be asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "hub"


@pytest.fixture
def silent_endpoint(hub_cache, monkeypatch):
    """A hub that accepts connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(hub, "HUB_ANSWER_SECONDS", 0.3)
        yield


def load_from(path, name="local", **changes):
    asked = dict.fromkeys(["hub_id", "revision", "gguf_file"])
    asked |= {"path": path and str(path), "dtype": "float32", "device": "cpu"}
    return load_model(name, **(asked | changes))


def tokens_of(ids):
    ids = torch.as_tensor(ids, dtype=torch.int64)
    return Tokens(ids, torch.ones_like(ids), torch.zeros_like(ids), hash="")


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- models


def test_a_loaded_model_computes_what_the_saved_one_did(saved):
    loaded, ids = load_from(saved), torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded.model(ids).logits, tiny_gpt2()(ids).logits, rtol=0, atol=0)


def test_a_loaded_model_is_in_eval_mode_without_gradients_and_counted(saved):
    loaded = load_from(saved)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    block = 4 * 32 * 32 + 4 * 32 + 8 * 32 * 32 + 5 * 32 + 4 * 32  # attention, MLP, two norms
    assert loaded.num_parameters == (300 + 64) * 32 + 2 * block + 2 * 32
    assert max_context(loaded.model) == 64


def test_dtype_is_that_of_the_weights(saved):
    assert load_from(saved, dtype="float64").model.dtype == torch.float64


def test_loading_prints_nothing(saved, capfd):
    load_from(saved)
    assert capfd.readouterr() == ("", "")


def test_two_loads_have_the_same_weights_hash(saved):
    assert load_from(saved).weights_hash == load_from(saved).weights_hash


def test_weights_hash_changes_with_one_weight():
    model = tiny_gpt2()
    before = hash_weights(model)
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[3, 5] += 1e-6
    assert hash_weights(model) != before


def test_weights_hash_changes_with_a_name_a_shape_and_a_dtype():
    weights = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(3, 2),
        "c": torch.zeros(2, 3, dtype=torch.int32),
    }
    buffers = [torch.nn.Module() for _ in range(4)]
    for module, (name, value) in zip(
        buffers, [("a", "a"), ("b", "a"), ("a", "b"), ("a", "c")], strict=True
    ):
        module.register_buffer(name, weights[value])
    assert len({hash_weights(module) for module in buffers}) == 4


def test_the_demo_model_is_the_one_that_needs_no_place(saved, monkeypatch):
    monkeypatch.setattr(load, "DEMO_MODEL_DIR", saved)
    assert load_from(None, name="demo").source == "demo"
    with pytest.raises(ValueError, match="model other has neither hub_id"):
        load_from(None, name="other")


def test_a_relative_path_is_resolved_against_the_current_directory(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert load_from(saved.name).source == saved.name


def test_pickled_weights_are_refused(saved, tmp_path):
    shutil.copy(saved / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors.*never loaded") as error:
        load_from(tmp_path)
    one_line(error)


def test_a_model_whose_code_is_its_own_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(ValueError, match="cannot load the model") as error:
        load_from(tmp_path)
    one_line(error)


def test_weights_that_are_not_whole_are_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((saved / "config.json").read_text()) | {"n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"12 are missing.*transformer\.h\.2\.") as error:
        load_from(tmp_path)
    one_line(error)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere has no config\.json"):
        load_from(tmp_path / "nowhere")


def test_gguf_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"gguf and accelerate: pip install 'mhaprune\[gguf\]'"):
        load_from(tmp_path, gguf_file="model.gguf")
    with pytest.raises(ValueError, match=r"has no other\.gguf"):
        load_from(tmp_path, gguf_file="other.gguf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused(saved):
    with pytest.raises(ValueError, match="device=cuda cannot be used here"):
        load_from(saved, device="cuda")


# --- the hub


def test_a_cached_model_is_loaded_without_asking_the_hub(saved, hub_cache):
    shutil.copytree(saved, hub_cache / "models--org--tiny" / "snapshots" / REVISION)
    loaded = load_from(None, hub_id="org/tiny", revision=REVISION)
    assert loaded.source == f"org/tiny@{REVISION}"
    assert loaded.weights_hash == load_from(saved).weights_hash


def test_a_hub_model_needs_a_revision_and_no_path():
    with pytest.raises(ValueError, match=r"needs model\.revision"):
        load_from(None, hub_id="org/tiny")
    with pytest.raises(ValueError, match="both set"):
        load_from("here", hub_id="org/tiny", revision=REVISION)


def test_offline_and_uncached_says_what_was_tried_and_what_to_do(hub_cache):
    with pytest.raises(ValueError, match="model org/tiny at revision") as error:
        load_from(None, hub_id="org/tiny", revision=REVISION)
    message = one_line(error)
    for part in (REVISION, str(hub_cache), "HF_HUB_OFFLINE", "hf download org/tiny", "make demo"):
        assert part in message
    assert "model=local model.path=DIR" in message


def test_a_half_cached_model_is_not_taken_for_a_whole_one(saved, hub_cache):
    snapshot = hub_cache / "models--org--tiny" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    shutil.copy(saved / "config.json", snapshot)
    with pytest.raises(ValueError, match="neither in the cache"):
        load_from(None, hub_id="org/tiny", revision=REVISION)


def test_a_hub_that_does_not_answer_is_given_up_soon(silent_endpoint):
    started = time.monotonic()
    with pytest.raises(ValueError, match="nor within reach at http://127") as error:
        load_from(None, hub_id="org/tiny", revision=REVISION)
    assert time.monotonic() - started < 3
    assert "timed out" in one_line(error) or "no answer" in one_line(error)


def cache_dataset(hub_cache: Path, config_name: str, splits: dict[str, list[str]]) -> None:
    folder = hub_cache / "datasets--org--text" / "snapshots" / REVISION / config_name
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        table = datasets.Dataset.from_dict({"text": rows, "number": list(range(len(rows)))})
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def test_hub_rows_are_joined_and_cut_where_documents_start(hub_cache, capfd):
    cache_dataset(hub_cache, "raw", {"test": [" = One = ", "", "a", " = Two = ", "b"]})
    capfd.readouterr()
    text = load_hub_text(
        "org/text", "raw", "test", "text", REVISION, "\n\n", document_start="^ = [^=].* = $"
    )
    assert text.documents == (" = One = \n\n\n\na\n\n", " = Two = \n\nb")
    assert text.whole == " = One = \n\n\n\na\n\n = Two = \n\nb"
    assert capfd.readouterr().err == ""


def test_a_split_or_column_that_is_not_there_is_named(hub_cache):
    cache_dataset(hub_cache, "raw", {"test": ["a"]})
    with pytest.raises(ValueError, match=r"hf download org/text .*raw/\*validation\*") as error:
        load_hub_text("org/text", "raw", "validation", "text", REVISION, "", document_start=None)
    assert "dataset=text dataset.path=FILE" in one_line(error)
    for column in ("body", "number"):
        with pytest.raises(ValueError, match=f"no column {column} of text.*can be text, number"):
            load_hub_text("org/text", "raw", "test", column, REVISION, "", document_start=None)


# --- text files


def test_a_text_file_is_kept_byte_for_byte(tmp_path):
    content = f"\ufeff a\r\nb\rc \n{MULTI_BYTE}".encode()
    (tmp_path / "text").write_bytes(content)
    text = load_text_file(str(tmp_path / "text"), document_start=None)
    assert text.whole.encode() == content


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file"), (b"ab\xff", "not UTF-8.*position 2"), (b" \n", "no text in it")],
)
def test_a_text_file_that_cannot_be_used_is_one_line(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as error:
        load_text_file(str(tmp_path / "text"), document_start=None)
    one_line(error)


def test_a_directory_is_not_a_text_file(tmp_path):
    with pytest.raises(ValueError, match=r"expected a text file at .*directory"):
        load_text_file(str(tmp_path), document_start=None)


# --- documents


def test_documents_begin_at_matches_and_add_up_to_the_text():
    documents = split_documents(ARTICLES, "^ = [^=].* = $")
    assert documents == (
        "\n = One = \n\n = = Part = = \nfirst .\n",
        " = Two = \nsecond .\n",
    )


def test_text_before_the_first_match_is_a_document():
    assert split_documents("preface\n# a\nx\n# b\n", "^#") == ("preface\n", "# a\nx\n", "# b\n")


def test_an_expression_that_matches_nowhere_or_is_none_is_refused():
    with pytest.raises(ValueError, match="matches nowhere"):
        split_documents("text", "^#")
    with pytest.raises(ValueError, match="not a regular expression"):
        split_documents("text", "(")


def test_calibration_is_the_last_fraction_cut_at_the_nearest_document():
    text = Text(("a" * 50, "b" * 35, "c" * 15), joiner="|", source="letters")
    evaluation, calibration = split_calibration(text, 0.2)
    assert evaluation.documents == ("a" * 50, "b" * 35)
    assert calibration.documents == ("c" * 15,)
    assert (evaluation.joiner, calibration.joiner) == ("|", "|")
    assert calibration.source == "letters (its last 20%)"


def test_calibration_of_one_document_is_cut_at_the_nearest_line():
    lines = [f"line {number}\n" for number in range(10)]
    evaluation, calibration = split_calibration(Text(("".join(lines),), "", "lines"), 0.32)
    assert evaluation.documents == ("".join(lines[:7]),)
    assert calibration.documents == ("".join(lines[7:]),)


@pytest.mark.parametrize("documents", [("one line",), ("a\n \n",), ("a", " ")])
def test_a_text_without_a_second_part_cannot_be_cut(documents):
    with pytest.raises(ValueError, match="can be set aside"):
        split_calibration(Text(documents, "", "short"), 0.1)


# --- tokens


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    tokens = tokenize(tokenizer, Text((MULTI_BYTE,), "", ""), bos=False, separator="none")
    assert int(tokens.num_bytes.sum()) == 7 + 2 + 3 * 3 + 4  # 7 ASCII
    assert tokenizer.decode(tokens.ids) == MULTI_BYTE


def test_a_character_of_several_tokens_is_counted_once(tokenizer):
    tokens = tokenize(tokenizer, Text(("a🙂b",), "", ""), bos=False, separator="none")
    assert tokens.num_bytes.tolist() == [1, 4, 0, 0, 0, 1]  # 🙂 is four tokens of one byte each


@pytest.mark.parametrize("trims", [False, True])
def test_bytes_of_a_token_include_its_leading_space(trims):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trims)
    tokens = tokenize(tokenizer, Text(("the mat was ",), "", ""), bos=False, separator="none")
    pieces = [len(tokenizer.decode([token])) for token in tokens.ids]
    assert tokens.num_bytes.tolist() == pieces
    assert sum(pieces) == 12


def test_tokens_of_the_whole_belong_to_the_document_they_end_in(tokenizer):
    text = Text(("aé", "🙂", "z"), joiner="\n", source="")
    tokens = tokenize(tokenizer, text, bos=False, separator="none")
    # a, é (2 tokens), newline | 🙂 (4 tokens), newline | z
    assert tokens.document.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert tokenizer.decode(tokens.ids) == text.whole


def test_eos_opens_each_document_and_has_no_bytes(tokenizer):
    text = Text(("ab", "", "é"), joiner="never used", source="")
    tokens = tokenize(tokenizer, text, bos=False, separator="eos")
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    e_acute = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert tokens.ids.tolist() == [0, a, b, 0, 0, *e_acute]
    assert tokens.num_bytes.tolist() == [0, 1, 1, 0, 0, 2, 0]
    assert tokens.document.tolist() == [0, 0, 0, 1, 2, 2, 2]


def test_bos_comes_once_before_everything(tokenizer):
    text = Text(("a", "b"), joiner="", source="")
    without = tokenize(tokenizer, text, bos=False, separator="none")
    tokens = tokenize(tokenizer, text, bos=True, separator="none")
    assert tokens.ids.tolist() == [0, *without.ids.tolist()]
    assert (tokens.num_bytes[0], tokens.document[0]) == (0, 0)


def test_special_tokens_that_the_tokenizer_lacks_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no bos token; set dataset\.bos=false"):
        tokenize(tokenizer, Text(("a",), "", ""), bos=True, separator="none")
    with pytest.raises(ValueError, match=r"no eos token; set dataset\.separator=none"):
        tokenize(tokenizer, Text(("a",), "", ""), bos=False, separator="eos")


def test_an_empty_text_has_no_tokens(tokenizer):
    with pytest.raises(ValueError, match="nothing has no tokens"):
        tokenize(tokenizer, Text(("",), "", "nothing"), bos=False, separator="none")


def test_token_hash_is_sha256_of_the_ids_as_int64(tokenizer):
    tokens = tokenize(tokenizer, Text((END * 2,), "", ""), bos=False, separator="none")
    assert tokens.ids.tolist() == [0, 0]
    # printf '\0%.0s' $(seq 16) | sha256sum
    assert tokens.hash == "374708fff7719dd5979ec875d56cd2286f6d3cf7ec317a3b25632aab28ec37bb"


def test_a_text_longer_than_the_context_is_tokenized_in_silence_and_fast(tokenizer, capfd):
    text = Text(("the cat sat on the mat .\n" * 20_000,), "", "")
    started = time.monotonic()
    tokens = tokenize(tokenizer, text, bos=False, separator="none")
    assert time.monotonic() - started < 5
    assert int(tokens.num_bytes.sum()) == 25 * 20_000
    assert capfd.readouterr() == ("", "")


# --- calibration and evaluation


def num_shared(calibration, evaluation) -> int:
    """How many of the evaluation text's passages of 64 are counted as shared: 0 if it passes."""
    try:
        check_disjoint(tokens_of(calibration), tokens_of(evaluation))
    except ValueError as error:
        return int(re.search(r"holds (\d+) of the evaluation text's \d+ passages", str(error))[1])
    return 0


@pytest.mark.parametrize("num_planted", [0, 1, 3, 15])
def test_texts_are_disjoint_only_if_they_share_no_passage_and_each_shared_one_is_counted(
    num_planted,
):
    """The count is that of a search for every passage at every place; 1,000 tokens hold 15."""
    ids = np.random.default_rng(0).integers(0, 10_000, 2_000)
    calibration, evaluation = ids[:1_000], ids[1_000:].copy()
    for number in range(num_planted):
        evaluation[64 * number : 64 * (number + 1)] = calibration[37 * number :][:64]
    passages = [evaluation[start : start + 64] for start in range(0, 1_000 - 63, 64)]
    places = [calibration[start : start + 64] for start in range(1_000 - 63)]
    found = [any(np.array_equal(passage, place) for place in places) for passage in passages]
    assert len(found) == 15
    assert num_shared(calibration, evaluation) == sum(found) == num_planted


def test_a_shared_passage_is_found_at_any_alignment():
    rng = np.random.default_rng(1)
    evaluation, calibration = rng.integers(0, 10_000, 640), rng.integers(0, 10_000, 1_000)
    calibration[101 : 101 + 128] = evaluation[192:320]
    with pytest.raises(ValueError, match="2 of the evaluation text's 10 passages of 64") as error:
        check_disjoint(tokens_of(calibration), tokens_of(evaluation))
    assert "calibration_split" in one_line(error)


@pytest.mark.parametrize(("length", "passages"), [(63, 0), (64, 1), (127, 1), (128, 2)])
def test_63_shared_tokens_are_not_a_passage_and_64_are(length, passages):
    rng = np.random.default_rng(2)
    evaluation, calibration = rng.integers(0, 10_000, 640), rng.integers(0, 10_000, 1_000)
    calibration[7 : 7 + length] = evaluation[64 : 64 + length]
    assert num_shared(calibration, evaluation) == passages


def test_a_text_shorter_than_a_passage_is_compared_whole():
    calibration = tokens_of(range(100))
    with pytest.raises(ValueError, match="1 of the evaluation text's 1 passages of 10 tokens"):
        check_disjoint(calibration, tokens_of(range(33, 43)))
    check_disjoint(calibration, tokens_of([*range(33, 42), 7]))
