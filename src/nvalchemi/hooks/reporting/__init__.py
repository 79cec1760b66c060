"""Reports of a run: collected once, shown in the terminal, in TensorBoard, on a page."""

from nvalchemi.hooks.reporting.html import HTMLReporter
from nvalchemi.hooks.reporting.orchestrator import ReportingOrchestrator
from nvalchemi.hooks.reporting.reporter import Reporter
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot, collect_scalars
from nvalchemi.hooks.reporting.structures import StructureLog, StructureRecord
from nvalchemi.hooks.reporting.tensorboard import TensorBoardReporter
from nvalchemi.hooks.reporting.terminal import RichReporter

__all__ = [
    "HTMLReporter",
    "Reporter",
    "ReportingOrchestrator",
    "RichReporter",
    "ScalarSnapshot",
    "StructureLog",
    "StructureRecord",
    "TensorBoardReporter",
    "collect_scalars",
]
