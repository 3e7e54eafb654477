"""Networks by kind: the decoder of tokens, and those that transformers and timm build."""
