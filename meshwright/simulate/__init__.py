"""Plan -> Work -> Timeline -> Forecast. No torch."""

from meshwright.core.room import make_callable

make_callable(__name__, "meshwright.simulate.timeline", "simulate")
