"""Torch mechanisms that techniques share or that need torch when they are defined."""
