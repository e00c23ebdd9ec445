"""Questions to the planner: the fastest plan, why, what if, other device counts, other batches. No torch."""
