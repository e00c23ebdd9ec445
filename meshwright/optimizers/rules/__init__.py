"""One file for each optimizer: its update and its price. Importing them never imports torch."""
