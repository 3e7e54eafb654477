"""Built-in networks: small classifiers, a GPT, and the models of transformers and timm."""
