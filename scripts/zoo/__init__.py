"""Stock architectures through the engine: `python -m scripts.zoo` runs them and writes docs/reference/architectures.md.

`libraries` lists and builds the networks, `small_transformers` those of transformers; `parts` prunes one in a process
of its own, `peer` by Torch-Pruning; `processes` limits these processes; `page` writes the page.
`random_runs` does the same with networks that `random_networks` draws from seeds, of the layers in `random_layers`.
`structure_runs` makes networks of transformers smaller by structure, saves and loads them; `structure_page` writes
docs/reference/transformers-by-structure.md from the results.
"""
