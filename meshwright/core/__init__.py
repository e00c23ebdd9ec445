"""The vocabulary every other room speaks. Nothing here imports torch, opens a socket or reads the environment."""
