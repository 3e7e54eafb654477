"""Masked training with the trainers of other libraries; each file needs the library that it is named after."""
