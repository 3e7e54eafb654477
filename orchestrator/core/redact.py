"""Redaction of everything that leaves a sweep, with one function for each output: text, logs, HTML, Markdown, JSON.

Names, messages and settings may come from somebody else. Passwords, tokens and keys are hidden, characters that control
a terminal or reverse the text direction are written as escapes, and markup is escaped.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from html import escape
from itertools import pairwise
from typing import Any

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_ANYWHERE = re.compile(r"\w*(?:password|passwd|passphrase|secret|credential)s?|jwts?|authorization")
_SECRET_AT_THE_END = re.compile(
    r"pass|pw|\w*pwd|\w*token|tokens|auth|bearer|cookies?|sig|signature|(?:api|access|account|private)keys?"
)
_SECRET_KEYS = frozenset(
    {"api", "access", "account", "auth", "encryption", "master", "openai", "private", "signing", "ssh", "wandb"}
)
_ORDINARY = re.compile(
    r"add|band|backward|bos|class|cls|conv|distillation|end|eos|first|forward|high|image|img|low|mask|max|"
    r"min|multi|n|new|num|one|pad|per|prompt|query|register|second|sep|single|special|start|stop|text|"
    r"total|two|unk|vocab"
)
"""Words before `token`, `tokens`, `pass` or `pw` that make a name harmless: `cls_token`, `max_tokens`, `high_pass`."""

_QUOTED = (
    r"[bru]?(?:"
    r"""\\"(?:[^"\\\n]|\\[^"\n])*\\"|\\'(?:[^'\\\n]|\\[^'\n])*\\'|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_BRACKETED = (
    r"\[[^\]\n]{0,2000}\]|\([^)\n]{0,2000}\)|"
    r"\{[^{}\n]{0,2000}(?:\{[^{}\n]{0,2000}\}[^{}\n]{0,2000}){0,9}\}"
)
_BARE = (
    rf"(?:\\.|{_BRACKETED}|"
    r"""[^\s,;&#'"`)\]}]|[)\]}'"`](?=\w)|[,;&#](?=[^\s'"])(?![\w.@/+-]+[=:]))+"""
)
_USERINFO = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,30}\\?://)(?P<user>[^\s/?#:@]{0,500})"
    r"(?P<secret>:(?:[^\s/?#]{0,500}|[^\s'\"`<>]{0,500}))?@",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"""(?<![\w/:.@+-])(?P<user>[\w.+-]{1,100}):(?!/)[^\s'"`:@]{1,200}@(?=[\w\[])""")
_HEADER = re.compile(
    r"""\b((?:cookie|authorization)[ \t]*:[ \t]*)[^\s"'][^\n"'`]*|\b(bearer[ \t]+)[^\s"'`]{8,}""", re.IGNORECASE
)
_QUERY = re.compile(r"(?P<name>[?&;#][^\s=&;#?]+)(?P<sep>=)(?P<value>[^\s&;#'\"]*)")
_OPTION = re.compile(r"(?<![\w-])(?P<name>--[\w-]{1,100})(?P<sep>[ \t]+)(?P<value>[^\s-]\S*)")
_NAME = re.compile(
    r"(?<![\w.@/+?&;#-])(?P<name>[\w.@/+-]{1,200})"
    r"""(?:\\?["'`]?[ \t]*(?:=(?!=)|(?P<colon>:(?![:/\\])))[ \t]*|`?[ ](?P<told>\(=))"""
)
_VALUE, _TOLD = re.compile(f"{_QUOTED}|{_BARE}"), re.compile(r".{0,2000}?(?=\)(?:[\s:;,.]|$))")
_NO_SECRET = re.compile(r"""["']?(?:none|null|true|false|\*{3})?["']?""", re.IGNORECASE)
_REMEMBERED = 200
"""Maximum length of a text whose `shown` form is cached: names and values are shown many times."""
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def redact(text: str) -> str:
    """Replace every recognizable secret in `text` by `***`.

    Secrets are the password of a URI (`scheme://user:password@host`), the user name of a URI without a password, as it
    may be a token, and the value of every name that `is_secret` (`?token=...`, `store.options.secret=...`,
    `"password": "..."`, `--token ...`). Notations of people, programs, Hydra (`https\\://`), Python and JSON are known.
    """
    if not ("=" in text or ":" in text or "@" in text or " " in text):
        return text
    text = _LOGIN.sub(rf"\g<user>:{HIDDEN}@", _USERINFO.sub(_without_userinfo, text))
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _without_values(_OPTION.sub(_without_value, _QUERY.sub(_without_value, text)))


def redact_tree(value: Any, path: str = "", text: Callable[[str], str] = redact) -> Any:
    """Redact every text and key of plain data, and replace values under a secret key by `***`.

    Values that are empty, 0, None, false or true stay, because they are no secrets.

    Args:
        value: the data.
        path: the key that holds `value`.
        text: the function that redacts a text.
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {
            text(key) if isinstance(key, str) else key: HIDDEN
            if item and item is not True and _is_secret_path(f"{path}.{key}")
            else redact_tree(item, str(key), text)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_tree(item, path, text) for item in value]
    return value


@lru_cache(maxsize=4096)
def redact_argument(argument: str) -> str:
    """Redact one argument of a command line, such as `+model.token=[a, b]`: the value extends to the end."""
    name, equals, value = argument.partition("=")
    if value and " " not in name and _is_secret_path(name):
        return f"{name}{equals}{HIDDEN}"
    return redact(argument)


def secrets_in(value: Any, hidden: bool = False) -> Iterator[str]:
    """Yield the values under keys that are secret: texts, each line of a text, and numbers.

    Values too short to tell from other text are left out.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from secrets_in(item, hidden or is_secret(str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, hidden)
    elif hidden and isinstance(value, str | int) and not isinstance(value, bool):
        least = 3 if isinstance(value, str) else 5
        yield from (text for text in {str(value), *str(value).splitlines()} if len(text) > least)


def without(text: str, secrets: Iterable[str]) -> str:
    """Replace every occurrence of these secrets in `text` by `***`."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def shown(text: object) -> str:
    """Return `text` redacted, with control characters escaped, as in `\\x1b`."""
    found = str(text)
    return _shown_before(found) if len(found) <= _REMEMBERED else _shown(found)


def html(text: object) -> str:
    """Return a text, redacted and escaped, for HTML or SVG."""
    return escape(shown(text))


def markdown(text: object) -> str:
    """Return a text, redacted and escaped, on one line for Markdown."""
    return re.sub(r"[\\`*\[\]|]", r"\\\g<0>", escape(" ".join(shown(text).split()), quote=False))


def shown_tree(value: Any) -> Any:
    """Return plain data with `redact_tree`, and every text and key as `shown`."""
    return redact_tree(value, text=shown)


def shown_json(value: Any, **form: Any) -> str:
    """Return plain data as redacted JSON in ASCII, without control characters.

    Args:
        value: the data.
        form: arguments of `json.dumps`, such as `indent`.
    """
    return json.dumps(redact_tree(value), allow_nan=False, **form)


def logger(name: str) -> logging.Logger:
    """Return the logger of a module; its messages pass through `shown`."""
    found = logging.getLogger(name)
    if _filter not in found.filters:
        found.addFilter(_filter)
    return found


def _filter(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown(record.getMessage()), ()
    return True


def _shown(text: str) -> str:
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), redact(text))


_shown_before = lru_cache(maxsize=2**14)(_shown)


@lru_cache(maxsize=2**12)
def is_secret(name: str) -> bool:
    """Whether `name` holds a secret, as `AWS_SECRET_ACCESS_KEY` or `model.password`."""
    *others, last = ["", *(word.lower() for word in _WORD.findall(name.rpartition(".")[2]))]
    if any(map(_SECRET_ANYWHERE.fullmatch, (*others, last))):
        return True
    if last == "id" and others[-1] == "key":
        *others, last = others
    if last in ("key", "keys"):
        return others[-1] in _SECRET_KEYS
    return _SECRET_AT_THE_END.fullmatch(last) is not None and not _ORDINARY.fullmatch(others[-1])


@lru_cache(maxsize=4096)
def _is_secret_path(name: str) -> bool:
    """Whether a part of a dotted name is secret, or two adjacent parts together are, as in `api.key`."""
    parts = name.split(".")
    return any(map(is_secret, parts)) or any(is_secret("_".join(pair)) for pair in pairwise(parts))


def _without_userinfo(match: re.Match[str]) -> str:
    if match["secret"]:
        return f"{match['scheme']}{match['user']}:{HIDDEN}@"
    return f"{match['scheme']}{HIDDEN}@" if match["user"] else match[0]


def _without_value(match: re.Match[str]) -> str:
    return f"{match['name']}{match['sep']}{HIDDEN}" if match["value"] and is_secret(match["name"]) else match[0]


def _without_values(text: str) -> str:
    """Hide the values of secret names. The value of another name may contain secret names, as in `{token: ...}`."""
    parts, end = [], 0
    for name in _NAME.finditer(text):
        if name.start() < end or not _is_secret_path(name["name"]):
            continue
        value = (_TOLD if name["told"] else _VALUE).match(text, name.end())
        if value is not None and not _NO_SECRET.fullmatch(value[0]):
            quote = value[0][0] if value[0][0] in "\"'" and name["colon"] else ""
            parts.append(f"{text[end : name.end()]}{quote}{HIDDEN}{quote}")
            end = value.end()
    return "".join((*parts, text[end:]))
