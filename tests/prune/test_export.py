import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from mhaprune.model.architectures import head_shape
from mhaprune.model.heads import Head
from mhaprune.model.load import hash_weights
from mhaprune.prune.compaction import COMPACTABLE, compact, make_dense
from mhaprune.prune.export import check_directory, export, model_card
from tests.micro import tiny_model
from tests.tiny import tiny_gpt2, tiny_tokenizer

HEADS = [Head(0, head) for head in range(4)] + [Head(1, 1)]  # a layer without heads, uneven groups
IDS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))

# Loads the directories, first where mhaprune is not installed, then where its file was imported.
PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

place, *model_types = sys.argv[1:]
ids = torch.load(place + "/ids")

def load(form, loader, **options):
    for model_type in model_types:
        directory = f"{place}/{model_type}-{form}"
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, output_loading_info=True, **options
        )
        assert not any(report.values()), report
        generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        words = AutoTokenizer.from_pretrained(directory)("the cat")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits
        found = (model.state_dict(), logits, generated, words, type(model).__module__)
        torch.save(found, f"{directory}.{loader}")

sys.modules["mhaprune"] = None  # importing it raises ImportError
load("dense", "alone")
load("compact", "alone", trust_remote_code=True)
del sys.modules["mhaprune"]
import mhaprune
load("compact", "importing")
"""
LOADED = {  # form and loader -> the module whose class was loaded
    ("dense", "alone"): "transformers.models.",
    ("compact", "alone"): "transformers_modules.",
    ("compact", "importing"): "mhaprune.prune.modeling_pruned",
}


def pruned(model_type, form):
    model = tiny_model(model_type)
    shape = head_shape(model)
    generator = torch.Generator().manual_seed(5)
    constants = torch.randn(2, 4, shape.d_head, generator=generator)
    if form == "compact":
        return compact(model, HEADS, constants)
    return make_dense(model, HEADS, None if model_type in ("mistral", "qwen2") else constants)


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Where every model lies in both forms and `MODEL_TYPE-FORM.LOADER` holds what was loaded."""
    place = tmp_path_factory.mktemp("exports")
    torch.save(IDS, place / "ids")
    for model_type in COMPACTABLE:
        for form in ("dense", "compact"):
            directory = place / f"{model_type}-{form}"
            export(directory, pruned(model_type, form), tiny_tokenizer(), form, "Card.\n", {})
    environment = {
        "HF_HOME": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, place, *COMPACTABLE],
        env=os.environ | environment,
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("model_type", COMPACTABLE)
@pytest.mark.parametrize(("form", "loader"), LOADED)
def test_an_export_is_the_same_model_in_a_program_of_its_own(reloaded, model_type, form, loader):
    found = torch.load(reloaded / f"{model_type}-{form}.{loader}")
    weights, logits, generated, words, module = found
    model = pruned(model_type, form)
    expected = model.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=1e-6)
    again = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, again)
    assert words == tiny_tokenizer()("the cat")["input_ids"]
    assert module.startswith(LOADED[form, loader])


def test_the_files_of_both_forms(tmp_path):
    model, tokenizer = tiny_gpt2(), tiny_tokenizer()
    export(tmp_path / "a" / "dense", make_dense(model, HEADS), tokenizer, "dense", "é", {"b": 1})
    export(tmp_path / "compact", compact(model, HEADS), tokenizer, "compact", "card", {})
    common = {"README.md", "config.json", "generation_config.json", "manifest.json"}
    common |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    dense = tmp_path / "a" / "dense"
    assert {file.name for file in dense.iterdir()} == common
    written = {file.name for file in (tmp_path / "compact").iterdir()}
    assert written == common | {"modeling_pruned.py"}
    assert (dense / "README.md").read_text(encoding="utf-8") == "é"
    assert (dense / "manifest.json").read_text(encoding="utf-8") == '{\n  "b": 1\n}\n'
    config = json.loads((tmp_path / "compact" / "config.json").read_text(encoding="utf-8"))
    assert config["heads_per_layer"] == [0, 3]
    assert config["auto_map"] == {
        "AutoConfig": "modeling_pruned.PrunedGPT2Config",
        "AutoModelForCausalLM": "modeling_pruned.PrunedGPT2LMHeadModel",
    }
    assert not any(name.startswith("_") for name in config)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "compact"}


def test_an_empty_directory_is_filled(tmp_path):
    check_directory(tmp_path / "there")
    (tmp_path / "there").mkdir()
    check_directory(tmp_path / "there")
    export(tmp_path / "there", tiny_gpt2(), tiny_tokenizer(), "dense", "card", {})
    assert hash_weights(GPT2LMHeadModel.from_pretrained(tmp_path / "there")) == hash_weights(
        tiny_gpt2()
    )


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match=f"{name} exists and is not an empty directory"):
            export(tmp_path / name, tiny_gpt2(), tiny_tokenizer(), "dense", "card", {})
        with pytest.raises(ValueError, match=f"{name} exists and is not an empty directory"):
            check_directory(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == [
        tmp_path / "file",
        tmp_path / "full",
        tmp_path / "full" / "note.txt",
    ]
    assert (tmp_path / "full" / "note.txt").read_text() == "mine"


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()

    def fail(directory):
        assert (directory / "model.safetensors").exists()
        raise OSError("disk full")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "out", tiny_gpt2(), tokenizer, "dense", "card", {})
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_the_other_form_or_a_manifest_with_nan_is_refused_before_writing(tmp_path):
    model, tokenizer = tiny_gpt2(), tiny_tokenizer()
    refused = [
        (model, "compact", {}, "expected a model in compact form, got one of type gpt2"),
        (compact(model, HEADS), "dense", {}, "in dense form, got one of type mhaprune_gpt2"),
        (model, "dense", {"loss": float("nan")}, "plain, finite JSON values"),
        (model, "dense", {"path": Path()}, "plain, finite JSON values"),
    ]
    for each, form, manifest, message in refused:
        with pytest.raises(ValueError, match=message):
            export(tmp_path / "out", each, tokenizer, form, "card", manifest)
    assert list(tmp_path.iterdir()) == []


CURVE = [
    {"heads removed": removed, "nats/token": 3.0 + removed / 7, "verdict": "ok"}
    for removed in range(10)
]
CARD = {
    "base_model": "gpt2@abc",
    "weights_hash": "0123",
    "heads": [Head(7, 2), Head(4, 11), Head(4, 0)],
    "num_heads": 144,
    "ablation": "mean over the training split of WikiText-2",
    "protocol": "WikiText-2 test, context 1024, stride 512",
    "curve": CURVE,
    "chosen": 3,
}


def test_the_card_says_what_was_removed_from_what_and_how_it_was_measured():
    before, _, after = model_card(form="dense", **CARD).partition("## Loss around this point")
    assert before == (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- pruned\n---\n\n"
        "# gpt2@abc without 3 of its 144 attention heads\n\n"
        "- Base model: gpt2@abc\n"
        "- sha256 of its weights: `0123`\n"
        "- Ablation: mean over the training split of WikiText-2\n"
        "- Protocol: WikiText-2 test, context 1024, stride 512\n\n"
        "## Heads removed\n\n"
        "- layer 4: 0, 11\n"
        "- layer 7: 2\n\n"
    )
    assert re.findall("^## (.*)", after, re.M) == ["How to load it", "Licence"]
    assert after.endswith(
        "\n\n## Licence\n\n"
        "These weights are derived from gpt2@abc; the base model's licence applies to them.\n"
    )


def test_a_card_without_heads_removed_says_none_and_one_that_was_healed_how():
    card = model_card(form="dense", **CARD | {"heads": []}, healed="20 steps to 3.1 nats/token")
    assert "\n# gpt2@abc without 0 of its 144 attention heads\n" in card
    assert "\n## Heads removed\n\nNone.\n\n## Loss" in card
    assert "stride 512\n- Healed by 20 steps to 3.1 nats/token\n\n" in card


def test_the_cards_table_is_the_curve_around_the_chosen_row():
    table = [line for line in model_card(form="dense", **CARD).splitlines() if line[:1] == "|"]
    assert table[:2] == ["| heads removed | nats/token | verdict |", "| --- | --- | --- |"]
    assert [line.split(" | ")[0] for line in table[2:]] == [
        "| 0", "| 1", "| 2", "| **3**", "| 4", "| 5", "| 6",
    ]  # fmt: skip
    assert table[5] == "| **3** | **3.4286** | **ok** |"
    first = model_card(form="dense", **CARD | {"chosen": 0}).splitlines()
    assert len([line for line in first if line[:1] == "|"]) == 2 + 4
    with pytest.raises(ValueError, match="a row of the curve, 0 to 9"):
        model_card(form="dense", **CARD | {"chosen": 10})


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("dense", 'AutoModelForCausalLM.from_pretrained("DIRECTORY")'),
        ("compact", 'AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)'),
    ],
)
def test_the_card_says_how_to_load_this_form(form, call):
    card = model_card(form=form, **CARD)
    code = card.split("```python\n")[1].split("```")[0]
    assert f"model = {call}" in code.splitlines()
    compile(code, "card", "exec")
    assert ("modeling_pruned.py" in card) == (form == "compact")
