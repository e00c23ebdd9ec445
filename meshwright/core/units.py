"""SI inside, pretty only at the edge."""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2


def _scaled(value: float, units: dict[str, float], digits: str) -> str:
    """In the first of the units, largest first, of which there is one or more; empty: less than one of the last."""
    return next((f"{value / size:{digits}} {unit}" for unit, size in units.items() if abs(value) >= size), "")


def pretty_bytes(value: float) -> str:
    return _scaled(value, {"TiB": 1024**4, "GiB": GIB, "MiB": MIB, "KiB": 1024}, ".1f") or f"{value:.0f} B"


def pretty_rate(value: float, unit: str) -> str:
    """`989 TFLOP/s`, `4.8 TB/s`: powers of ten, as data sheets have them."""
    powers = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    return _scaled(value, {letter + unit: size for letter, size in powers.items()}, ".3g") or f"{value:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 replica`, `8 replicas`, `2 batches`."""
    plural = noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s")
    return f"{count} {noun if count == 1 else plural}"


def pretty_seconds(value: float) -> str:
    if value <= 0:
        return "0 s"
    for large, small, size in (("h", "min", 3600), ("min", "s", 60)):
        if value >= size:
            return f"{int(value // size)} {large} {int(value % size * 60 // size):02d} {small}"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def pretty_count(value: float) -> str:
    return _scaled(value, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}, ".3g") or f"{value:.3g}"
