"""Values fit to be published: without secrets and home directories."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "[hidden]"


def hide_private(value: object, key: str = "") -> Any:
    """`value` as plain JSON values, fit to be published: no secrets and no home directory.

    What stands under a key such as api_key, hf_token, password or client_secret becomes "[hidden]",
    also in overrides ("tracker.api_key=..."); so do credentials in a URL. The user's home becomes
    "~". Counts and hashes (num_tokens, tokens_hash) and special tokens (bos_token) stay.
    """
    if _is_secret(key) and not (value is None or isinstance(value, bool)):
        is_number = isinstance(value, int | float) and key.lower().endswith("token")
        return value if is_number else HIDDEN
    if isinstance(value, Mapping):
        return {str(name): hide_private(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_private(each) for each in value]
    return _hide_in_text(str(value)) if isinstance(value, str | Path) else value


_SECRET_KEY = re.compile(r"secret|passw|passphrase|credential|(api|access|private) ?key|\btoken$")


_SPECIAL_TOKEN = re.compile(r"\b(bos|eos|pad|unk|sep|cls|mask|per|first) token$")


_KEY_IN_TEXT = re.compile(r"([\w.-]+)=|[{,]\s*(\w+)\s*:")


def _is_secret(key: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", key).lower()
    return bool(_SECRET_KEY.search(words)) and not _SPECIAL_TOKEN.search(words)


def _hide_in_text(text: str) -> str:
    for match in _KEY_IN_TEXT.finditer(text):
        if _is_secret(match[1] or match[2]):
            text = text[: match.end()] + HIDDEN
            break
    text = re.sub(r"://[^/@\s]+@", f"://{HIDDEN}@", text)
    return _home_pattern().sub("~", text)


def _home_pattern() -> re.Pattern[str]:
    """Matches the home directory at the start of a path, as spelled and with links resolved."""
    try:
        homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    except RuntimeError:  # this user has no home
        homes = set()
    spelled = "|".join(re.escape(home) for home in sorted(homes)) or "(?!)"
    return re.compile(rf"(?<![\w.~-])(?:{spelled})(?![\w-])")
