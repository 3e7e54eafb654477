"""Inputs of blocks for calibration: by calls of single blocks where this is proven equal to whole passes."""
