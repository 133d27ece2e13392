"""Errors that a user can meet. Each carries the exit code of the command line."""

from __future__ import annotations

from collections.abc import Collection


class TriforceError(Exception):
    """Base of every error that the input or the machine causes, not a bug in this code."""

    exit_code = 1


class UsageError(TriforceError, ValueError):
    """An argument that cannot be used as given."""

    exit_code = 2


class DoesNotFitError(TriforceError):
    """More device or host memory is needed than is available."""

    exit_code = 3

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, remedy: str) -> None:
        self.what = what
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(
            f"{what} needs {in_units(needed_bytes)} and {in_units(max(0, available_bytes))} is "
            f"available; {remedy}"
        )


def in_units(size: int) -> str:
    """Format a size with four digits in the largest binary unit that does not exceed it."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1 << 10 * exponent:
            return f"{size / (1 << 10 * exponent):.4g} {unit}"
    return f"{size} bytes"


class OutOfDeviceMemoryError(DoesNotFitError):
    """The device ran out of memory although the plan fitted: another program uses it."""

    def __init__(self, what: str) -> None:
        TriforceError.__init__(
            self, f"the device ran out of memory ({what}); use a smaller budget of device memory"
        )


class CheckpointError(TriforceError):
    """A checkpoint that is missing, damaged or inconsistent."""

    exit_code = 4


class CannotSplitError(CheckpointError):
    """Matrices have more numbers far below others than the split format has room for.

    path: path of the model
    names: names of the matrices; empty if they are of another rank's share
    """

    def __init__(self, path: object, names: Collection[str]) -> None:
        self.path, self.names = path, frozenset(names)
        first, *others = sorted(self.names) or ("another GPU's share",)
        and_others = f" and {len(others)} other matrices" if others else ""
        super().__init__(
            f"{path}: more numbers of {first}{and_others} are far below the greatest beside them "
            "than the split format has room for; leave out --weights split"
        )


class UnsupportedModelError(CheckpointError):
    """A valid checkpoint of a kind that this runtime does not run."""


class OutputError(TriforceError):
    """The output of a run could not be written."""

    exit_code = 5


class LinkError(TriforceError):
    """A transfer between host and device failed or did not finish in time."""


class DeviceFailedError(LinkError):
    """A device failed and computes nothing more in this process."""


class DeviceHungError(DeviceFailedError):
    """A device does not answer. No wait for it can be interrupted: leave the process by `os._exit`,
    as the command line does.
    """


class RankError(TriforceError):
    """One of several ranks failed or no longer answers."""

    def __init__(self, why: str, exit_code: int = 1) -> None:
        """exit_code: exit code of the error that the rank met."""
        super().__init__(why)
        self.exit_code = exit_code
