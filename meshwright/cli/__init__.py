"""The command line. `main` parses; each command is one file, imported when it is asked for."""
