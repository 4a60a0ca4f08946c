"""The manifest says what ran, and tells no secrets."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhaprune.run import manifest as manifest_module
from mhaprune.run.manifest import environment_manifest, manifest
from mhaprune.tables.manifest import read_manifest
from mhaprune.tables.private import HIDDEN, hide_private


def made(**changes: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "config": {"model": "gpt2", "num_tokens": 4096},
        "command": ["rank_heads.py", "model=gpt2"],
        "seed": 7,
        "device": "cpu",
        "dtype": "float32",
        "weights_hash": "aa",
        "tokens_hash": "bb",
        "protocol": {"context": 256},
        "started": datetime(2025, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))),
    }
    return manifest(**{**entries, **changes})


def test_the_manifest_says_what_ran_on_what_and_when() -> None:
    running = made()
    assert running["config"] == {"model": "gpt2", "num_tokens": 4096}
    assert running["command"] == ["rank_heads.py", "model=gpt2"]
    assert [running[key] for key in ("seed", "device", "dtype")] == [7, "cpu", "float32"]
    assert [running[key] for key in ("weights_hash", "tokens_hash")] == ["aa", "bb"]
    assert running["protocol"] == {"context": 256}
    assert running["started_utc"] == "2025-01-02T01:04:05+00:00"
    assert running["finished_utc"] is None
    assert set(running["versions"]) == {
        *("python", "mhaprune", "torch", "transformers", "datasets", "hydra-core", "wandb"),
        "numpy",
    }
    assert running["versions"]["numpy"] == np.__version__
    assert running["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    finished = made(finished=datetime(2025, 1, 2, 3, 30, tzinfo=UTC), num_shards=2)
    assert finished["finished_utc"] == "2025-01-02T03:30:00+00:00"
    assert finished["num_shards"] == 2


def test_the_manifest_has_no_secret_no_home_and_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    secret = "s3cr3t"
    recorded = made(
        config={"tracker": {"api_key": secret, "hf_token": secret}, "cache": "/home/jane/.cache"},
        command=["/home/jane/run.py", f"tracker.api_key={secret}", f"+t={{password: {secret}}}"],
    )
    assert recorded["config"]["cache"] == "~/.cache"
    assert recorded["command"] == [
        "~/run.py",
        f"tracker.api_key={HIDDEN}",
        f"+t={{password:{HIDDEN}",
    ]
    for private in (secret, "jane", "from-the-environment"):
        assert private not in json.dumps(recorded)


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "WANDB_API_KEY", "access_key", "secret_key", "private-key"),
        *("token", "hf_token", "accessToken", "password", "db-password", "passwd"),
        *("secret", "client_secret", "credentials", "passphrase"),
    ],
)
def test_what_a_secret_is_called_hides_it_at_any_depth(key: str) -> None:
    assert hide_private({"a": [{key: "hunter2"}]}) == {"a": [{key: HIDDEN}]}
    assert hide_private([f"tracker.{key}=hunter2 and more"]) == [f"tracker.{key}={HIDDEN}"]
    assert hide_private({key: None}) == {key: None}


@pytest.mark.parametrize(
    "config",
    [
        {"tokens_hash": "ab12", "num_tokens": 4096, "weights_hash": "cd34"},
        {
            "tokenizer": "gpt2",
            "tokens": "all",
            "bos_token": "<|endoftext|>",
            "first_token": "scored",
        },
        {"nats_per_token": 3.25, "previous_token": 0.5, "use_token": True, "keyboard": "de"},
        {"key": "value", "monkey": "x", "sort_keys": True, "override": "num_tokens=4096"},
        {"text": "loss per token: 3.2", "url": "https://example.org/a@b"},
    ],
)
def test_what_only_looks_like_a_secret_stays(config: dict[str, Any]) -> None:
    assert hide_private(config) == config


def test_numbers_can_be_passwords_and_urls_can_hold_them() -> None:
    assert hide_private({"password": 1234}) == {"password": HIDDEN}
    assert hide_private("https://me:pw@example.org/x") == f"https://{HIDDEN}@example.org/x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/jane", "~"),
        ("dir=/home/jane/x", "dir=~/x"),
        ("file:///home/jane/x", "file://~/x"),
        ("/home/janet/x", "/home/janet/x"),
        ("/mnt/home/jane/x", "/mnt/home/jane/x"),
    ],
)
def test_the_home_directory_is_written_as_a_tilde(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    assert hide_private(Path(text) if text.startswith("/") else text) == expected


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=directory, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_and_dirt_of_the_checkout_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "__file__", str(tmp_path / "manifest.py"))

    def state() -> tuple[str | None, bool | None]:
        found = environment_manifest()
        return found["git_commit"], found["git_dirty"]

    (tmp_path / "manifest.py").write_text("")
    assert state() == (None, None)  # no repository
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "of another project")
    assert state() == (None, None)  # a repository that does not know the file
    git(tmp_path, "add", "manifest.py")
    git(tmp_path, "commit", "--quiet", "-m", "of this one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert state() == (commit, False)
    (tmp_path / "manifest.py").write_text("changed")
    assert state() == (commit, True)


def test_a_machine_without_git_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.platform", lambda: "Linux")
    found = environment_manifest()
    assert (found["git_commit"], found["git_dirty"]) == (None, None)


def test_the_manifest_of_a_finished_run_is_read_back(tmp_path: Path) -> None:
    written = made(finished=datetime(2025, 1, 2, 4, tzinfo=UTC))
    (tmp_path / "manifest.json").write_text(json.dumps(written))
    assert read_manifest(tmp_path) == written


def test_a_directory_without_a_finished_run_has_no_manifest_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path} is not the directory of a run: it has no"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(made()))
    with pytest.raises(ValueError, match=rf"in {tmp_path} is not finished; go on with resume="):
        read_manifest(tmp_path)
