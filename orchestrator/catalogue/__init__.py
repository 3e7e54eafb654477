"""What a sweep has built in beside the engine's: networks, data sets, tasks and formats, a row each; no torch."""
