"""A comparison as terminal text, CSV, figures and one HTML page."""
