"""After a run: what was predicted over what was measured, as one picture and one line."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.files import write_whole
from meshwright.core.timeline import Timeline, last_step
from meshwright.report.timeline_lanes import compared
from meshwright.report.timeline_svg import picture

PICTURE = "timeline.svg"


def overlay(folder: Path, title: str) -> str:
    """Write the picture beside both timelines. The line, or why there is none; empty where no step was recorded."""
    if not (folder / "measured.timeline.json").exists():
        return ""
    try:
        predicted = load_artefact(Timeline, folder / "predicted.timeline.json")
        measured = last_step(load_artefact(Timeline, folder / "measured.timeline.json"))
        line = compared(predicted, measured)
        write_whole(folder / PICTURE, picture([predicted, measured], title=title, notes=[line]) + "\n")
    except MeshwrightError as error:
        return f"{PICTURE} is not written: {error}"
    except OSError as error:
        return f"{PICTURE} is not written: {error.strerror or error}"
    return line
