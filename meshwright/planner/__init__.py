"""Profile and cluster to ranked plans, with a certified gap. No torch."""
