"""Secrets are hidden from people and logs; all other text stays the same."""

from __future__ import annotations

import time

import pytest

from orchestrator.core.redact import is_secret, redact, redact_argument, redact_tree, shown, without
from orchestrator.execution.perform import failure_of
from orchestrator.store.store import Store


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa55@host:5000/x", "https://user:***@host:5000/x"),
        ("https://user:p@ss@host/x", "https://user:***@host/x"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("https://:pa55@host", "https://:***@host"),
        ("postgresql+psycopg2://u:p@db/mlflow", "postgresql+psycopg2://u:***@db/mlflow"),
        ("https://host/x?token=abc&page=2", "https://host/x?token=***&page=2"),
        (
            "https://h/x?page=2&X-Amz-Signature=abc#access_token=d",
            "https://h/x?page=2&X-Amz-Signature=***#access_token=***",
        ),
        ("https://h/?api_key=a;apikey=b", "https://h/?api_key=***;apikey=***"),
        ("python -m x +store.options.secret=abc seed=0", "python -m x +store.options.secret=*** seed=0"),
        (r"+store.options.url=https\://me\:abc@host/", r"+store.options.url=https\://me\:***@host/"),
        ("tracking.uri='http://h/?token=abc' seed=0", "tracking.uri='http://h/?token=***' seed=0"),
        ("store.options.api_key='a b' seed=0", "store.options.api_key=*** seed=0"),
        ("cannot reach http://u:p@a and http://v:q@b.", "cannot reach http://u:***@a and http://v:***@b."),
        ("mysql://u:p/q@h/db", "mysql://u:***@h/db"),
        ("mysql://u:p?q#r@h/db", "mysql://u:***@h/db"),
        ("refused: u:p@h", "refused: u:***@h"),
        ("refused: u:p/q@h", "refused: u:***@h"),
        ("C:/data/x@2 at 12:30, image a:b", "C:/data/x@2 at 12:30, image a:b"),
        ("+model.api.key=S seed=0", "+model.api.key=*** seed=0"),
        ('{"password": "S", "user": "me"}', '{"password": "***", "user": "me"}'),
        ('{"password":"S","user":"me"}', '{"password":"***","user":"me"}'),
        (r'said "{\"password\": \"S\", \"a\": 1}"', r'said "{\"password\": ***, \"a\": 1}"'),
        (r'{"password": "S\"T", "a": 1}', '{"password": "***", "a": 1}'),
        ("{'tokens': ['S', 'T'], 'a': 1}", "{'tokens': ***, 'a': 1}"),
        ("{'auth': ('me', 'S'), 'a': 1}", "{'auth': ***, 'a': 1}"),
        ("{'auth': {'me': {'S': 'T'}}, 'a': 1}", "{'auth': ***, 'a': 1}"),
        ("environ({'HF_TOKEN': 'S', 'HOME': '/root'})", "environ({'HF_TOKEN': '***', 'HOME': '/root'})"),
        ("AWS_SECRET_ACCESS_KEY=S/T+u==\nHOME=/root", "AWS_SECRET_ACCESS_KEY=***\nHOME=/root"),
        ("+model={api_key: S, width: 3}", "+model={api_key: ***, width: 3}"),
        ("+model={login: {pw: S}, width: 3}", "+model={login: {pw: ***}, width: 3}"),
        ("model.password=S,T seed=0", "model.password=*** seed=0"),
        ("model.passwords=[S, T] seed=0", "model.passwords=*** seed=0"),
        ("model.passwords.first=S", "model.passwords.first=***"),
        ('model.password="S T" seed=0', "model.password=*** seed=0"),
        (r"model.password=S\ T\,U seed=0", "model.password=*** seed=0"),
        ("login(user='me', password='S')", "login(user='me', password=***)"),
        ("`model.password` (=S) must be", "`model.password` (=***) must be"),
        ("`model.password` (='S T') must be", "`model.password` (=***) must be"),
        ("Authorization: Bearer S\nHost: h", "Authorization: ***\nHost: h"),
        ("Cookie: a=S; b=T\nHost: h", "Cookie: ***\nHost: h"),
        ("{'Authorization': 'Basic S', 'Host': 'h'}", "{'Authorization': '***', 'Host': 'h'}"),
        ("the server refused Bearer eyJhbGciOi.S", "the server refused Bearer ***"),
        ("login --password S --user me", "login --password *** --user me"),
    ],
)
def test_secrets_in_text_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///mlflow.db",
        "sqlite:////home/me@work/mlflow.db",
        "http://127.0.0.1:5000",
        "https://host/a:b@c",
        "s3://bucket/prefix",
        "write to me@example.org",
        "https://host/?page=2&author=x&max_tokens=5",
        "/plain/path",
        "model.token_dim=64 model.pass_through=true data.tokenizer=bert passes=3",
        "{'token_dim': 64, 'max_tokens': 512, 'cls_token': True, 'use_auth_token': None, 'author': 'me'}",
        "blocks.0.conv_pw.weight: every weight is pruned",
        "l1_unstructured sparsity=0.9 seed=0",
        "assert token == other, tests::token::x",
        "File /a/b.py:12, in main",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name",
    ["password", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "secret", "api_key",
     "apiKey", "client-secret", "accessToken", "account_key", "PGPASSWORD", "pass", "pw", "authorization", "secrets",
     "passwords", "tokens", "cookie", "jwt", "model.api_key", "AWS_ACCESS_KEY_ID", "db_pass", "token_2",
     "secret_value", "wandb_key"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "max_tokens", "key", "author", "keep", "passes", "mask_keys", "design", "token_dim", "pass_through",
     "cls_token", "high_pass", "conv_pw", "num_tokens", "pad_token_id", "password.of_none", "compass"],
)  # fmt: skip
def test_names_that_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_long_text_is_no_burden() -> None:
    text = "a" * 20_000 + "://" + "b" * 20_000 + "?" + "c" * 20_000
    start = time.process_time()
    assert redact(text) == text
    for repeated in ("a://b:", "a:", "a=", "{", "'", '\\"', "--a ", "token=(", "token={", "token='", "?a", "`token (="):
        redact(repeated * 2_000)
    assert time.process_time() - start < 1


def test_a_config_keeps_its_shape() -> None:
    config = {
        "tracking": {"uri": "http://u:p@h", "token": "abc", "password": None},
        "store": {"options": {"secret": "s", "endpoint_url": "http://h"}, "secret": {"a": 1}},
        "sizes": (1, 2.5, None, True),
        "passwords": ["S"],
        "class_token": True,
        "auth": False,
        "api": {"key": "S", "keys": 3},
    }
    assert redact_tree(config) == {
        "tracking": {"uri": "http://u:***@h", "token": "***", "password": None},
        "store": {"options": {"secret": "***", "endpoint_url": "http://h"}, "secret": "***"},
        "sizes": [1, 2.5, None, True],
        "passwords": "***",
        "class_token": True,
        "auth": False,
        "api": {"key": "***", "keys": "***"},
    }


@pytest.mark.parametrize("argument", ["+a.token=S, T", "a.password=b c", "password.a=)S", "~token=S T"])
def test_an_argument_is_hidden_to_its_end(argument: str) -> None:
    assert redact_argument(argument) == f"{argument.partition('=')[0]}=***"
    assert redact_argument("seed=0") == "seed=0"


def test_a_secret_that_holds_another_is_hidden_whole() -> None:
    secrets = ["swordfish", "swordfish-2026", "fish"]
    for given in (secrets, secrets[::-1]):
        assert without("swordfish-2026, swordfish and fish", given) == "***, *** and ***"


def test_what_steers_a_terminal_is_written_out() -> None:
    text = "a\tb\x1b[2J\x9b1m\r\u202ec\n"

    assert shown(text) == r"a	b\x1b[2J\x9b1m\r\u202ec" + "\n"


def test_a_failure_quotes_no_secret_that_it_was_given() -> None:
    given = [{"model": {"api_key": "S3cret", "login": {"pw": ["T0ken"], "pass": 8514720},
                       "ssh_key": "-----\nAAAAB3\nNzaC1y\n", "pin": "open"}}]  # fmt: skip
    try:
        raise ValueError("no login with S3cret, T0ken, 8514720, 'AAAAB3\\nNzaC1y' at mysql://u:p@h; pin open")
    except ValueError as error:
        failure = failure_of(error, given=given)

    assert failure.message == "ValueError: no login with ***, ***, ***, '***\\n***' at mysql://u:***@h; pin open"
    assert "S3cret, T0ken" not in failure.traceback


def test_a_store_shows_no_secret() -> None:
    store = Store("memory://user:pa55@host/x", options={"secret": "s3cr3t"})
    assert "pa55" not in repr(store)
    assert "s3cr3t" not in repr(store)
