"""Repairs after a pruning: new values for survivors, biases and BatchNorm statistics."""
