"""Answers, timelines and runs for people and programs: text, JSON and SVG. No torch."""
