"""SI inside, pretty only at the edge."""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2


def pretty_bytes(value: float) -> str:
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def pretty_rate(value: float, unit: str) -> str:
    """`989 TFLOP/s`, `4.8 TB/s`: powers of ten, as data sheets have them."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 replica`, `8 replicas`, `2 batches`."""
    plural = noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s")
    return f"{count} {noun if count == 1 else plural}"


def pretty_seconds(value: float) -> str:
    if value <= 0:
        return "0 s"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"


def pretty_count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
