"""Image data sets: built-in ones, Hugging Face ones, and the storage and normalisation of pixels."""
