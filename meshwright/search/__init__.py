"""Profile + cluster + goal -> ranked plans, why the others lost, and a certified gap. No torch."""
