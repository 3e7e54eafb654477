"""Built-in data sets: images, with the storage and normalisation of their pixels, and text."""
