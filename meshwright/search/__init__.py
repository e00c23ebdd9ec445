"""Profile + cluster + goal -> ranked plans, why the others lost, and a certified gap. No torch."""

from meshwright.core.room import make_callable

make_callable(__name__, "meshwright.search.search", "search")
