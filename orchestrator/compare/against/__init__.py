"""What a sweep is held against, paired by seed and point: a baseline that was written down, or another sweep."""
