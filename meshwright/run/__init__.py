"""A training run without a console: its file, its preparation, its result. No torch."""
