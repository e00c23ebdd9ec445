"""Pure generators of who does what when."""
