"""Reference models: small, fast, and described without torch so that planning needs none."""
