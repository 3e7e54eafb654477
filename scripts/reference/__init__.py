"""Pages of docs/reference made from the code: `python -m scripts.reference` writes them."""
