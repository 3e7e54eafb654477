"""What a training needs to go on from where it was: as it is, as it is kept, and as it is taken up again."""
