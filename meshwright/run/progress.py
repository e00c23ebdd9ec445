"""Live progress of rank 0: a line that redraws itself on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds


class Progress:
    def __init__(self, first_step: int, num_steps: int, forecast_tokens_per_second: float):
        self.first_step, self.num_steps = first_step, num_steps
        self.forecast = forecast_tokens_per_second
        self.counts = "tokens"
        """Or samples, where they have no sequence."""
        self.start = self.shown = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def step(self, step: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        now = time.monotonic()
        is_last = step + 1 == self.num_steps
        if not is_last and now - self.shown < (0.1 if self.is_terminal else 5.0) and step > self.first_step:
            return
        self.shown = now
        done = step + 1 - self.first_step
        left = (now - self.start) / done * (self.num_steps - step - 1)
        when = f"done in {pretty_seconds(now - self.start)}" if is_last else f"left {pretty_seconds(left)}"
        share = tokens_per_second / self.forecast if self.forecast else 0.0
        text = (
            f"step {step + 1}/{self.num_steps}  loss {loss:.4f}  {pretty_count(tokens_per_second)} {self.counts}/s "
            f"({share:.0%} of forecast)  memory {pretty_bytes(memory_bytes)}  {when}"
        )
        self._show(text, ends=is_last)

    def say(self, text: str) -> None:
        """A line that stays."""
        clear = "\r\x1b[2K" if self.is_terminal else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)

    def _show(self, text: str, ends: bool) -> None:
        if self.is_terminal:
            sys.stderr.write(f"\r\x1b[2K{text}" + ("\n" if ends else ""))
            sys.stderr.flush()
        else:
            print(text, file=sys.stderr, flush=True)


def held_out_text(found: Mapping[str, float]) -> str:
    """`0.412 bits per byte`, or `loss 0.31, 97.2 % right`."""
    if "held_out_bits_per_byte" in found:
        return f"{found['held_out_bits_per_byte']:.3f} bits per byte"
    text = f"loss {found['held_out_loss']:.4f}"
    return f"{text}, {found['held_out_top1']:.1%} right" if "held_out_top1" in found else text


def one_line(text: str) -> str:
    """A text as a terminal may show it: what is not printable is spelt out."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
