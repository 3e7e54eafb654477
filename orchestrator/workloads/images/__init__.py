"""Image sets: the named ones, those of Hugging Face, and how their pixels are kept and normalised."""
