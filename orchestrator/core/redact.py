"""Keep secrets out of logs, tags and saved configs: passwords, tokens and keys in URIs and in named settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:passw(?:or)?d|passphrase|pwd|secret|token|credentials?|signature|sig|auth"
    r"|(?:api|access|account|private)[_-]?key)(?:$|[^a-z])|(?:password|secret|token)$",
    re.IGNORECASE,
)
_USERINFO = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,30}\\?://)(?P<user>[^\s/?#:@]*)(?P<secret>:[^\s/?#]*)?@", re.IGNORECASE
)
_SETTING = re.compile(r"(?<![\w.@/+?&;#-])(?P<name>[\w.@/+-]{1,200})=(?P<value>'[^']*'|\"[^\"]*\"|[^\s&;#,'\"]+)")
_QUERY = re.compile(r"(?P<name>[?&;#][^\s=&;#?]+)=(?P<value>[^\s&;#'\"]*)")


def redact(text: str) -> str:
    """Return `text` with the secrets of every URI in it replaced by `***`.

    Hidden are a password (`scheme://user:password@host`), a user name that stands alone and so is a token
    (`scheme://token@host`), and query or fragment values whose name says that they are secret (`?token=...`); also the
    values of settings with such names (`store.options.secret=...`), and all of this as Hydra writes it (`https\\://`).
    """
    return _SETTING.sub(_hide_setting, _QUERY.sub(_hide_query, _USERINFO.sub(_hide_userinfo, text)))


def redact_tree(value: Any) -> Any:
    """Return plain data with every string redacted and the values of secret-sounding keys replaced by `***`."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if item and is_secret(str(key)) and not isinstance(item, Mapping) else redact_tree(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_tree(item) for item in value]
    return value


def is_secret(name: str) -> bool:
    """Say whether a setting called `name` should not be shown, as `AWS_SECRET_ACCESS_KEY` or `password`."""
    return _SECRET_NAME.search(name) is not None


def _hide_userinfo(match: re.Match[str]) -> str:
    if match["secret"]:
        return f"{match['scheme']}{match['user']}:{HIDDEN}@"
    return f"{match['scheme']}{HIDDEN}@" if match["user"] else match[0]


def _hide_query(match: re.Match[str]) -> str:
    return f"{match['name']}={HIDDEN}" if match["value"] and is_secret(match["name"][1:]) else match[0]


def _hide_setting(match: re.Match[str]) -> str:
    return f"{match['name']}={HIDDEN}" if is_secret(match["name"]) else match[0]
