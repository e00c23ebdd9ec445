"""Modules written by others: examined, traced, split and run as a `Model`."""
