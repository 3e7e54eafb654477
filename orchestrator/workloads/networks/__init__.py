"""Networks by kind: small classifiers, the decoder of tokens, and those that transformers and timm build."""
