"""Model cards name what was pruned, from what the user typed, and from the files that the weights came with."""

from pathlib import Path

import pytest

from orchestrator.export.model_card import Origin, origin


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\nlicense: mit\nbase_model: them/large\n---\n# A", Origin("them/large", "mit")),
        ("---\nlicense: mit\nbase_model: [a/b, c/d]\n---\n", Origin("", "mit")),
        ("---\n[: no yaml\n---\n", Origin()),
        ("---\n- a list\n---\n", Origin()),
        ("# A page without a head\n", Origin()),
    ],
)
def test_a_readme_beside_the_weights_names_license_and_base_model(text: str, found: Origin, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)

    assert origin({"weights": str(tmp_path)}, tmp_path, Origin()) == found
    assert origin({"weights": str(tmp_path)}, tmp_path, Origin("my/own", "apache-2.0")) == Origin(
        "my/own", "apache-2.0"
    )


def test_a_name_on_the_hub_is_the_base_model(tmp_path: Path) -> None:
    source = tmp_path / "models--them--large" / "snapshots" / "0a1b"

    assert origin({"path": "", "weights": "them/large"}, source, Origin()) == Origin("them/large", "")
    assert origin({"path": "", "weights": "net/moved"}, tmp_path, Origin()) == Origin()
    assert list(Origin("them/large").lacks()) == [
        "names no license; pass --license NAME, that of the base model, such as apache-2.0"
    ]


def test_the_header_of_a_gguf_file_names_license_and_base_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "net.gguf", "llama")
    writer.add_license("apache-2.0")
    writer.add_base_model_count(1)
    writer.add_base_model_repo_url(0, "https://huggingface.co/them/large")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    assert origin({"weights": "net.gguf"}, tmp_path / "net.gguf", Origin()) == Origin("them/large", "apache-2.0")
