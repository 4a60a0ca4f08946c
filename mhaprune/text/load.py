"""Texts from the hub or the disk."""

from pathlib import Path
from typing import Any

from mhaprune.text.hub import fetch, first_line, quiet
from mhaprune.text.tokens import Text, split_documents


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
    directory = fetch("dataset", hub_id, revision, (pattern,))
    rows = _read_column(directory / (config_name or ""), split, column, hub_id)
    return _text(joiner.join(rows), document_start, source=f"{hub_id}@{revision} {pattern}")


def _text(text: str, document_start: str | None, source: str) -> Text:
    if not text.strip():
        raise ValueError(f"{source} has no text in it")
    return Text(split_documents(text, document_start), joiner="", source=source)


def _read_column(directory: Path, split: str, column: str, hub_id: str) -> list[str]:
    """Return a column of the split whose data files lie in the directory."""
    import datasets  # takes a second to import, and only texts from the hub need it

    try:
        with quiet():
            data = datasets.load_dataset(str(directory), split=split)
    except Exception as error:  # each file format has its own
        raise ValueError(f"cannot read {hub_id}, split {split}: {first_line(error)}") from error
    assert isinstance(data, datasets.Dataset)
    rows: list[Any] = list(data[column]) if column in data.column_names else [None]
    if not all(isinstance(row, str) for row in rows):
        names = ", ".join(data.column_names)
        raise ValueError(f"{hub_id} has no column {column} of text; dataset.column can be {names}")
    return rows
