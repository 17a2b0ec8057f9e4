"""Measurements of a device, kept between runs: an interrupted probe continues where it stopped."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trimtab.cluster.profile import PROFILE_VERSION, DeviceProfile
from trimtab.environment import cache_folder, logger
from trimtab.errors import TrimtabError
from trimtab.measure.timing import StepTimes
from trimtab.strict_files import require_writable


@dataclass
class _Content:
    profile: DeviceProfile
    done: set[str]
    steps: dict[str, list[StepTimes]]


_ADAPTER = TypeAdapter(_Content)


class ProbeCache:
    """The measurements of one device with one version of torch and trimtab.

    Args:
        called: the device's name according to the driver or the operating system.
        conditions: what else times depend on: threads, a share of the device.
        keep: whether anything is read or written; an emulated device ends with its emulation.
    """

    def __init__(
        self,
        called: str,
        conditions: str,
        *,
        torch: str,
        trimtab: str,
        folder: Path | None = None,
        keep: bool = True,
    ) -> None:
        parts = (called, conditions, f"torch-{torch}", f"trimtab-{trimtab}", f"profile-{PROFILE_VERSION}")
        name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-").lower() for part in parts)
        self.path = (folder or cache_folder() / "probe") / f"{name}.json"
        self.keep = keep
        self.profile = DeviceProfile(called=called)
        self.done: set[str] = set()
        self.steps: dict[str, list[StepTimes]] = {}
        """Timed steps of unfinished units."""

    def require_writable(self) -> None:
        """Raise if measurements could not be kept, before any is made."""
        if not self.keep:
            return
        remedy = "set XDG_CACHE_HOME to a folder that can be written"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrimtabError(
                f"the cache {self.path.parent} cannot be created: {error.strerror}; {remedy}"
            ) from None
        require_writable(self.path, remedy)

    def load(self) -> None:
        """Load the measurements of an earlier run; an unreadable file is ignored with a warning."""
        if not self.keep or not self.path.exists():
            return
        try:
            content = _ADAPTER.validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            logger().warning("%s cannot be read (%s); measuring again", self.path, type(error).__name__)
            return
        self.profile, self.done, self.steps = content.profile, content.done, content.steps

    def add(self, unit: str, profile: DeviceProfile) -> None:
        """Store the measurements of one unit of work."""
        self.profile = profile
        self.done.add(unit)
        self.steps.pop(unit, None)
        self.save()

    def save(self) -> None:
        if not self.keep:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced atomically: a probe that is killed while writing leaves the old file.
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(_ADAPTER.dump_json(_Content(self.profile, self.done, self.steps)))
        part.replace(self.path)
