"""`mw data prepare`: text to token files that training maps from disk."""

from __future__ import annotations

import time
from argparse import Namespace

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from meshwright.core.errors import error_at
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.data.prepare import prepare


def run(arguments: Namespace) -> int:
    if arguments.workers < 0:
        raise error_at("--workers", f"is {arguments.workers}.", "Use 1 or more; 0: one per core.")
    console = Console(stderr=True, highlight=False, markup=False)
    start = time.perf_counter()
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        prepared = prepare(
            arguments.inputs,
            arguments.output,
            tokenizer=arguments.tokenizer,
            text_key=arguments.text_key,
            prompt_key=arguments.prompt_key,
            chat_template=arguments.chat_template,
            num_workers=arguments.workers,
            report=lambda done, total, reused: bar.update(task, completed=done, total=total),
        )
    facts, made, seconds = prepared.facts, prepared.num_bytes - prepared.num_bytes_reused, time.perf_counter() - start
    if prepared.num_bytes_reused:
        console.print(f"{pretty_bytes(prepared.num_bytes_reused)} had been done by an earlier run")
    if made:
        console.print(f"{pretty_bytes(made)} in {pretty_seconds(seconds)}: {made / seconds / 1e6:.0f} MB/s")
    console.print(f"{pretty_count(facts.num_documents)} documents, {pretty_count(facts.num_tokens)} tokens")
    console.print(
        f'use it in a run file:\n\n  [data]\n  train = "{prepared.stem}.bin"\n  sequence = 1024\n'
        '  packing = "documents"   # or "stream", the default\n'
    )
    print(f"{prepared.stem}.bin")
    return 0
