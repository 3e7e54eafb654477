"""Masks kept in force by the trainers of other libraries; each file needs the library that it is named after."""
