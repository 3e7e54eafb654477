"""Language modelling: perplexities, comparison with the dense network, last words, greedy generations."""
