"""Viewer: an HTML page with curves, state graphs, advantages and evaluations of a run, or of two side by side."""

from .data import Run
from .episode_sets import Evaluation
from .page import InlinePage, write_page
from .sources import Sources, open_folder

__all__ = ["Evaluation", "InlinePage", "Run", "Sources", "open_folder", "write_page"]
