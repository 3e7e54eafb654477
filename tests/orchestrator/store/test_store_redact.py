"""Secrets stay out of what people and logs see; everything else stays as it was."""

from __future__ import annotations

import time

import pytest

from orchestrator.core.redact import is_secret, redact, redact_tree
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
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name",
    ["password", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "secret", "api_key",
     "apiKey", "client-secret", "accessToken", "account_key", "PGPASSWORD"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["tokenizer", "max_tokens", "key", "author", "keep", "passes", "mask_keys", "design"])
def test_names_that_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_long_text_is_no_burden() -> None:
    text = "a" * 20_000 + "://" + "b" * 20_000 + "?" + "c" * 20_000
    start = time.perf_counter()
    assert redact(text) == text
    assert time.perf_counter() - start < 1


def test_a_config_keeps_its_shape() -> None:
    config = {
        "tracking": {"uri": "http://u:p@h", "token": "abc", "password": None},
        "store": {"options": {"secret": "s", "endpoint_url": "http://h"}, "secret": {"a": 1}},
        "sizes": (1, 2.5, None, True),
    }
    assert redact_tree(config) == {
        "tracking": {"uri": "http://u:***@h", "token": "***", "password": None},
        "store": {"options": {"secret": "***", "endpoint_url": "http://h"}, "secret": {"a": 1}},
        "sizes": [1, 2.5, None, True],
    }


def test_a_store_shows_no_secret() -> None:
    store = Store("memory://user:pa55@host/x", options={"secret": "s3cr3t"})
    assert "pa55" not in repr(store)
    assert "s3cr3t" not in repr(store)
