"""What happens to the survivors of a pruning: their values, the biases and statistics that make up for what went."""
