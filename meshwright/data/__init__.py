"""Tokens in the same order for any mesh, with a resumable cursor. numpy only: never imports torch."""
