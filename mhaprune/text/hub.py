"""Files of the hub: models' and texts'.

It is asked only for what its cache lacks, and only once it has answered a short question: without a
network its own calls hang for most of a minute, while here a run stops within seconds and says what
to do.
"""

import contextlib
import fnmatch
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import transformers
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

HUB_ANSWER_SECONDS = 3.0
TOKENIZER_FILES = ("*.json", "*.txt", "*.model")


def fetch(
    kind: Literal["model", "dataset"], hub_id: str, revision: str, needed: Sequence[str]
) -> Path:
    """Return a hub repository's local copy, downloading what the cache lacks.

    Raises ValueError, saying what to do, unless each pattern in `needed` matches a file of it.
    """
    patterns = [*needed, *(TOKENIZER_FILES if kind == "model" else ())]
    request = {"repo_type": kind, "revision": revision, "allow_patterns": patterns}
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(hub_id, local_files_only=True, **request))
        if not missing_files(cached, needed):
            return cached
    if problem := _hub_problem():
        raise ValueError(_out_of_reach(kind, hub_id, revision, patterns, problem))
    try:
        fetched = Path(snapshot_download(hub_id, **request))
    except Exception as error:  # of several libraries, and none is for us to mend
        raise ValueError(f"cannot download {hub_id}@{revision}: {first_line(error)}") from error
    if missing := missing_files(fetched, needed):
        raise ValueError(f"{hub_id}@{revision} has no {' and no '.join(missing)}")
    return fetched


def missing_files(directory: Path, patterns: Sequence[str]) -> list[str]:
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
            problems.append(first_line(error))

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
def quiet() -> Iterator[None]:
    """Hold back progress bars, which all write to stderr, and transformers' warnings."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
