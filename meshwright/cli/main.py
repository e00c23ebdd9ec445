"""`mw`: parse, run one command, turn errors into one message and an exit code.

Nothing heavy is imported here: `mw --help` answers at once.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import os
import re
import signal
import sys
import tomllib
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from meshwright.core.wrapping import width_of, wrapped

EXAMPLES = """\
examples:
  mw plan --model llama3-8b --cluster 8xh100 --seq 8192 --batch 128
  mw train examples/laptop.toml
  mw train examples/laptop.toml --set train.steps=50 --set plan.pin='["tensor=2"]'
  mw check examples/laptop.toml
  mw simulate P.plan.json --model llama3-8b --cluster 8xh100 --seq 8192

exit codes: 0 success, 1 no plan fits, or a check or a run failed, 2 invalid usage or configuration, 70 crash loop,
75 stopped by a signal (saved, or nothing to save yet), 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """argparse that suggests the flag that was meant."""

    def error(self, message: str) -> NoReturn:
        from meshwright.core.errors import nearest

        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [flag for action in self._actions for flag in action.option_strings if len(flag) > 2]
            words = [w for w in message.removeprefix(prefix).split() if w.startswith("-")]
            guesses = [f"{word}: {nearest(word.split('=')[0], known)}" for word in words]
            message = message + "".join(f"\n  {guess}" for guess in guesses)
        elif match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choices = [word.strip(" '") for word in match.group(2).split(",")]
            message = f'"{match.group(1)}" is not one of them. {nearest(match.group(1), choices)}'
        self.exit(2, wrapped(f"{self.prog}: {message}\ntry: {self.prog} --help\n", width_of(sys.stderr)))


class _Help(argparse.HelpFormatter):
    """Lines end at words; commands that go on in the next line end with a backslash."""

    def __init__(self, prog: str):
        super().__init__(prog, width=min(width_of(sys.stdout, 80), 120))
        self._max_help_position = min(24, self._width // 3)

    def _format_usage(self, *given: Any) -> str:
        return wrapped(" ".join(super()._format_usage(*given).split()), self._width, "    ") + "\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return re.sub(r"^(-\w) [^,]+", r"\1", super()._format_action_invocation(action))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        goes_on = ("    ", " \\")
        lines = (wrapped(each, width, *(goes_on if each.startswith("  mw ") else ())) for each in text.splitlines())
        return "\n".join(lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width).splitlines()


class _Version(argparse.Action):
    """`meshwright 0.1.0, Python 3.11.7, torch 2.13.0`, without importing torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        import meshwright

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        print(f"meshwright {meshwright.__version__}, Python {sys.version.split()[0]}, torch {torch}")
        parser.exit()


def parser() -> Parser:
    top = Parser(
        prog="mw",
        description="Find the fastest parallelisation plan that fits a model and a cluster, predict its cost, run it "
        "on PyTorch, and compare the prediction with the measurement.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the versions of Meshwright, Python and torch")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    words = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
    for name, flags in COMMANDS.items():
        about = words[name]
        examples = "\n  ".join(["example:", *about["examples"]])
        epilog = "\n\n".join([examples, *about.get("notes", ())])
        texts = {"help": about["help"], "description": about["help"], "epilog": epilog}
        made = commands.add_parser(name, **texts, formatter_class=_Help)
        for names, settings in flags:
            made.add_argument(*names, **settings)
    return top


Flag = tuple[tuple[str, ...], dict[str, Any]]


def _flag(*names: str, **settings: Any) -> Flag:
    """What `add_argument` takes."""
    return names, settings


def _list(*names: str, metavar: str, help: str, **settings: Any) -> Flag:
    """A flag that may be given several times."""
    return _flag(*names, action="append", default=[], metavar=metavar, help=help, **settings)


_JSON = _flag("--json", action="store_true", help="print JSON")
_MODEL = "a preset, a Hugging Face folder or package.module:function"
_MODEL_FLAGS = (
    _flag("--model", metavar="M", help=_MODEL),
    _flag("--cluster", metavar="C", help="8xh100, 64x8xh100, or a .cluster.json"),
    _flag("--host-memory", metavar="SIZE", help="host memory that states and weights may use: 128GiB"),
    _flag("--seq", type=int, metavar="N", help="sequence length (default: at most 4096)"),
    _flag("--documents", type=int, metavar="N", help="tokens of each packed document; attention stays inside it"),
    _list("--change", metavar="KEY=N", help="change a dimension of a preset: num_layers=40, max_sequence=32768"),
    _flag("--optimizer", metavar="O", help="adamw (default), sgd, lion, muon, ...; with settings: sgd,momentum=0"),
    _list("--train", metavar="X", help="train only these parameters: 'blocks.3?.*', 'head.*'"),
    _list("--freeze", metavar="X", help="do not train these parameters: 'embed.*'"),
    _flag("--adapter", metavar="A", help="train low-rank adapters on frozen weights: rank=16,base=nf4"),
    _flag("--imbalance", type=float, metavar="F", help="load of the busiest rank of experts, relative to the mean"),
)
_RUN_FLAGS = (
    _flag("run", metavar="RUN.toml"),
    _flag("--plan", default="", metavar="P.plan.json", help="use this plan instead of searching"),
    _list("--set", dest="changes", metavar="a.b=c", help="change a key of the run file"),
)
_PLAN_FLAGS = (
    _flag("run", nargs="?", metavar="RUN.toml", help="take model, batch and sequence from a run file"),
    *_MODEL_FLAGS,
    _flag("--batch", metavar="N", help="samples per step (default 64); auto: compare batch sizes by time to a target"),
    _flag("--devices", metavar="A..B", help="compare device counts: 16..64; or plan for one: 16"),
    _flag("--max-memory", metavar="SIZE", help="memory to use on each device: 70GiB"),
    _flag("--headroom", type=float, metavar="PERCENT", help="percentage of device memory to leave free (default 6)"),
    _list("--pin", metavar="X", help="require a setting: tensor=2, recompute, microbatch=4"),
    _list("--ban", metavar="X", help="exclude a technique: pipeline"),
    _flag(
        "--allow",
        metavar="HOW",
        help="permitted deviation: exact, reordered, rounded (16-bit compute, default), lossy (fewer bits), "
        "approximate",
    ),
    _flag("--top", type=int, default=8, metavar="K", help="plans to show (default 8)"),
    _flag(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end each search after this time with the best plan so far and its optimality gap",
    ),
    _list("--why", metavar="X", help="explain a setting: tensor, tensor.size, microbatch"),
    _list(
        "--what-if",
        metavar="X",
        help="plan for changed hardware or batch: memory=+20GiB, inner=x2, outer=100GB/s, nodes=+1, devices=16, "
        "flops=x2, batch=256, seq=16384; several are combined",
    ),
    _flag("--front", action="store_true", help="the fastest plan for each memory size"),
    _flag(
        "--failures",
        metavar="F",
        help="goodput, best checkpoint interval and spare nodes: mtbf=8h/node,restart=3min[,checkpoint=20s][,repair=4h]"
        "[,interval=10min][,spares=2]",
    ),
    _flag(
        "--stragglers",
        metavar="SHARExTIMES",
        help="cost of slow devices: 0.1x2 are devices that take twice as long in a tenth of their steps",
    ),
    _flag("--critical-batch", metavar="N", help="for --batch auto: beyond it few steps are saved (default: estimated)"),
    _flag("--target-steps", metavar="N", help="for --batch auto: steps needed with the largest batches"),
    _flag("--target-tokens", metavar="N", help="tokens needed with small batches: 15T"),
    _flag("--from-run", metavar="RUN", help="plan with the measurements of a run, given by its folder or file"),
    _JSON,
    _flag("-o", "--output", metavar="P.plan.json", help="write the best plan"),
)
_SIMULATE_FLAGS = (
    _flag("plan", metavar="P.plan.json"),
    *_MODEL_FLAGS,
    _JSON,
    _flag("-o", "--output", metavar="T.timeline.json", help="write the timeline, and T.trace.json for Perfetto"),
    _flag("--svg", metavar="OUT.svg", help="write a picture: lanes, and the memory curve below"),
    _flag("--perfetto", metavar="OUT.json", help="write a trace for ui.perfetto.dev"),
    _flag("--measured", metavar="M.timeline.json", help="draw the measured timeline of a run below it"),
)
_PROBE_FLAGS = (
    _flag("-o", "--output", metavar="C.cluster.json", help="write a cluster file for --cluster"),
    _flag("--devices", type=int, metavar="N", help="devices to measure together (default: all)"),
    _flag("--quick", action="store_true", help="a few seconds, wider error bars"),
    _flag("--from-runs", nargs="?", const="", metavar="LEDGER", help="use measurements of `mw train` on this machine"),
)
_CHECK_FLAGS = (
    *_RUN_FLAGS,
    _flag("--steps", type=int, default=4, metavar="N", help="steps to compare (default 4)"),
    _JSON,
)
_CKPT_FLAGS = (
    _flag("action", choices=("list", "verify", "export", "import")),
    _flag("folder", metavar="FOLDER", help="a run folder; for import, a Hugging Face or DCP folder"),
    _flag("target", nargs="?", metavar="TARGET", help="export: the folder to write; import: the run folder"),
    _flag("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the exported weights"),
    _flag("--adapter-only", action="store_true", help="export only the low-rank adapters, in the format of PEFT"),
    _flag("--step", type=int, metavar="N", help="export this step (default: the newest complete one)"),
    _flag("--model", metavar="M", help="a preset, or the original Hugging Face folder"),
)
_DATA_FLAGS = (
    _flag("action", choices=("prepare",)),
    _flag("inputs", nargs="+", metavar="INPUT", help="text, JSONL or Parquet: files, folders, patterns"),
    _flag("-o", "--output", required=True, metavar="FOLDER_OR_PREFIX", help="where to write the .bin and .idx"),
    _flag("--tokenizer", default="byte", metavar="FILE", help="byte (default) or a tokenizers JSON file"),
    _flag("--workers", type=int, default=0, metavar="N", help="processes (default: one per core)"),
    _flag("--text-key", default="text", metavar="KEY", help="the field or column of the text"),
    _flag("--prompt-key", default="prompt", metavar="KEY", help="the field or column of a prompt"),
    _flag("--chat-template", default="", metavar="FILE", help="template of messages: a Jinja file, or chatml"),
)
COMMANDS: dict[str, Sequence[Flag]] = {
    "plan": _PLAN_FLAGS,
    "simulate": _SIMULATE_FLAGS,
    "train": _RUN_FLAGS,
    "check": _CHECK_FLAGS,
    "replan": (
        _flag("run", metavar="RUN", help="a run folder or a run file"),
        _flag("--plan", default="", metavar="P.plan.json", help="use this plan instead of searching"),
        _list("--pin", metavar="X", help="as for mw plan: tensor=2"),
        _list("--ban", metavar="X", help="as for mw plan: pipeline"),
        _flag("--ranks", type=int, default=0, metavar="N", help="continue with this number of ranks"),
    ),
    "replay": (
        _flag("run", metavar="RUN", help="a run folder or a run file"),
        _flag("step", nargs="?", type=int, metavar="STEP", help="number from 1 (default: steps of troubles.jsonl)"),
        _flag("--one-rank", action="store_true", help="use one process instead of the ranks of the plan"),
        _JSON,
    ),
    "probe": _PROBE_FLAGS,
    "profile": (
        _flag("model", nargs="?", metavar="M", help=f"{_MODEL}; without it, list the presets"),
        _flag("-o", "--output", metavar="M.profile.json"),
    ),
    "techniques": (_flag("name", nargs="?", help="describe this technique"),),
    "ckpt": _CKPT_FLAGS,
    "runs": (_flag("folder", nargs="?", default=".", metavar="FOLDER", help="where to look (default: here)"), _JSON),
    "data": _DATA_FLAGS,
}
"""The flags of each command, which the file cli/<command>.py runs; commands.toml has the rest of its help."""


_ASCII = {
    **dict.fromkeys("─━═", "-"),
    **dict.fromkeys("│┃║▎▏", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
    **dict.fromkeys("█▉▊▋▓■", "#"),
    **dict.fromkeys("▌▒", "="),
    **dict.fromkeys("░·…", "."),
    **dict.fromkeys("●•◆", "*"),
    "µ": "u",
    "×": "x",
    "→": ">",
    "≤": "<",
    "≥": ">",
}
"""For output that no terminal refuses: what its encoding lacks is written in ASCII, sign for sign."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # One sign for one: tables and pictures stay in their columns.
    return "".join(_ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def accept_any_encoding() -> None:
    """In both streams of this process, what their encoding lacks is written in ASCII."""
    codecs.register_error("meshwright-plain", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="meshwright-plain")


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["train"]:
        from meshwright.launch.guard import guard

        if (code := guard()) is not None:
            return code
    accept_any_encoding()
    top = parser()
    arguments, unknown = top.parse_known_args(argv)
    arguments.words = sys.argv[1:] if argv is None else list(argv)
    if unknown:
        known = top._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        where = known[arguments.command] if arguments.command else top  # type: ignore[index]
        where.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        top.print_help()
        return 0
    from meshwright.core.errors import MeshwrightError, OldNotation

    warnings.filterwarnings("once", category=OldNotation)
    warnings.showwarning = lambda message, *_: print(f"mw {arguments.command}: {message}", file=sys.stderr)
    try:
        with contextlib.ExitStack() as held:
            if arguments.command == "train":  # before anything slow is imported, so that no signal kills it half-way
                from meshwright.launch.local_ranks import stop_signals
                from meshwright.launch.rank_job import STOP_SIGNALS

                arguments.stop = held.enter_context(stop_signals((signal.SIGHUP, *STOP_SIGNALS), raises=True))
            module = importlib.import_module(f"meshwright.cli.{arguments.command}")
            return int(module.run(arguments))
    except MeshwrightError as error:
        for problem in error.problems:
            print(wrapped(f"mw {arguments.command}: {problem}", width_of(sys.stderr), "  "), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `mw ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = error.filename2 or error.filename or "a file"
        print(f"mw {arguments.command}: {place}: {error.strerror or error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        if type(stopped) is not KeyboardInterrupt:  # `Stopped`, of a run that has not saved
            from meshwright.launch.environment import how_to_go_on

            what = stopped.args[0] if stopped.args else "nothing is lost"
            print(f"mw {arguments.command}: stopped, {what}; {how_to_go_on(os.environ)}", file=sys.stderr)
            return 75
        print(f"mw {arguments.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
