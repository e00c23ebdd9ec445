"""`mw plan`: the fastest plan that fits, why it won, and what anything else would give."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from dataclasses import replace
from typing import Any

from rich.console import Console

from meshwright.ask.batch_goal import best_batch, fewer
from meshwright.ask.device_counts import compare_sizes, resized
from meshwright.ask.explain import explained_as_json
from meshwright.ask.memory_front import front
from meshwright.ask.question import Question
from meshwright.ask.ways_out import ways_out
from meshwright.ask.what_if import compare, usual_changes
from meshwright.ask.why import why
from meshwright.cli.arguments import PlanInputs
from meshwright.cli.plan_arguments import PlanRequest, read_asked, tokens_to_compare
from meshwright.planner.search import SearchResult, found_as_json
from meshwright.report import answer_json as as_json
from meshwright.report.answer_text import print_answer, print_head, print_short, print_ways_out
from meshwright.report.follow_up_text import (
    print_front,
    print_goals,
    print_sizes,
    print_what_if,
    print_why,
    worth_words,
)
from meshwright.report.terminal import Waiting, stdout, write_output

_QUICK_SECONDS = 2.0
"""A search this quick is asked again for what people ask next."""
STOPPED = 130


def run(arguments: Namespace) -> int:
    asked = read_asked(arguments)
    page = _Page(console=stdout(), is_json=arguments.json)
    code = _answer(arguments, asked, page)
    page.close()
    return code


class _Page:
    """Where answers go: printed as they come, or gathered and printed at the end as JSON."""

    def __init__(self, console: Console, is_json: bool):
        self.console, self.is_json = console, is_json
        self.told: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """For programs. Several answers to one flag stand in a list."""
        self.told[name] = value

    def close(self) -> None:
        if self.is_json:
            print(json.dumps(self.told))


def _answer(arguments: Namespace, asked: PlanRequest, page: _Page) -> int:
    question = _chosen(arguments, asked, page)
    if question is None:
        return STOPPED
    with Waiting("searching; Ctrl-C shows the best so far"):
        found = question.ask(top=arguments.top)
    if arguments.output and found.best is not None:
        write_output(arguments.output, found.best[0].to_json())
    if page.is_json:
        page.told |= found_as_json(found) | {"explain": explained_as_json(found)}
    else:
        print_head(page.console, question, found)
        if asked.is_narrow or arguments.front:
            print_short(page.console, found)
        if not (asked.is_narrow or arguments.front) or found.best is None:
            print_answer(page.console, question, found)
    if found.is_interrupted:
        return STOPPED
    try:
        _follow(arguments, asked, question, found, page)
    except KeyboardInterrupt:
        return STOPPED
    if found.best is None:
        return 1
    if not page.is_json:
        page.console.print(f"next: {_next(arguments, asked.wanted)}", markup=False)
    return 0


def _chosen(arguments: Namespace, asked: PlanRequest, page: _Page) -> Question | None:
    """The question with the devices and the batch that are best; None: stopped while choosing."""
    question = asked.question
    if asked.goal is not None:
        devices = asked.devices[::-1] or fewer(question.cluster.num_devices)
        with Waiting("searching batches") as waiting:
            goals = best_batch(question, asked.goal, _possible(question, devices), waiting.tell)
        if page.is_json:
            page.add("goal", as_json.goals_as_json(goals))
        else:
            print_goals(page.console, goals)
        chosen = goals.soonest
        if goals.is_interrupted:
            return None
        return question if chosen is None else chosen.outcome.question
    if not asked.devices:
        return question
    tokens = tokens_to_compare(arguments)
    with Waiting("searching sizes") as waiting:
        sizes = compare_sizes(question, asked.devices, waiting.tell)
    if page.is_json:
        page.add("sizes", as_json.sizes_as_json(sizes, tokens))
    else:
        print_sizes(page.console, sizes, tokens)
    if sizes.is_interrupted:
        return None
    if sizes.fastest is not None:
        return sizes.fastest.outcome.question
    return replace(question, cluster=resized(question.cluster, asked.devices[-1]) or question.cluster)


def _possible(question: Question, devices: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count for count in devices if resized(question.cluster, count) is not None)


def _follow(arguments: Namespace, asked: PlanRequest, question: Question, found: SearchResult, page: _Page) -> None:
    """What is asked about the answer; where nothing is, what people ask next."""
    with Waiting("searching again") as waiting:
        if found.best is None and not (asked.changes or arguments.front):
            ways, closed = ways_out(question, found, waiting.tell)
            if page.is_json:
                page.add("ways_out", as_json.ways_out_as_json(ways, closed))
            else:
                print_ways_out(page.console, ways, closed)
        if asked.knobs and found.best is not None:
            reasons = []
            for knob in asked.knobs:
                reasons.append(why(question, found.best, knob, waiting.tell))
                if not page.is_json:
                    print_why(page.console, reasons[-1])
            page.add("why", [as_json.why_as_json(each) for each in reasons])
        if asked.changes:
            compared = compare(question, asked.changes, found.best)
            page.add("what_if", as_json.what_if_as_json(compared))
            if not page.is_json:
                print_what_if(page.console, compared)
        if arguments.front:
            made = front(question, waiting.tell, found.best)
            page.add("front", as_json.front_as_json(made))
            if not page.is_json:
                print_front(page.console, made, question.machine.device.memory_bytes)
            if made.is_interrupted:
                raise KeyboardInterrupt
        is_plain = not (asked.is_narrow or arguments.front or page.is_json)
        if is_plain and found.best is not None:
            _print_usual(question, found, page.console)


def _print_usual(question: Question, found: SearchResult, console: Console) -> None:
    changes = usual_changes(question)
    if found.search_seconds >= _QUICK_SECONDS:
        console.print("\nwhat if: ask " + ", ".join(f"--what-if {change}" for change in changes) + "\n", markup=False)
        return
    console.print()
    for change in changes:
        compared = compare(question, (change,), found.best)
        console.print(f"what if {change}: {worth_words(compared)}", markup=False)
    console.print()


def _next(arguments: Namespace, wanted: PlanInputs) -> str:
    if not arguments.output:
        return "add -o best.plan.json to keep it, then: mw train RUN.toml --plan best.plan.json"
    if arguments.run:
        return shlex.join(["mw", "train", arguments.run, "--plan", arguments.output])
    words = ["--model", arguments.model, "--cluster", wanted.cluster_name, "--seq", str(wanted.sequence)]
    return shlex.join(["mw", "simulate", arguments.output, *words])
