"""Measurements of a device, kept between runs: an interrupted probe continues where it stopped."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trimtab.cluster.profile import DeviceProfile
from trimtab.environment import cache_folder, logger
from trimtab.measure.operators import StepTimes

_ADAPTER: TypeAdapter[DeviceProfile] = TypeAdapter(DeviceProfile)


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
        name = "-".join(_slug(part) for part in (called, conditions, f"torch-{torch}", f"trimtab-{trimtab}"))
        self.path = (folder or cache_folder() / "probe") / f"{name}.json"
        self.profile = DeviceProfile(called=called)
        self.done: set[str] = set()
        self.steps: dict[str, list[StepTimes]] = {}
        """Timed steps of unfinished units."""

        self.keep = keep

    def load(self) -> None:
        """Load the measurements of an earlier run; an unreadable file is ignored with a warning."""
        if not self.keep:
            return
        try:
            tree = json.loads(self.path.read_text(encoding="utf-8"))
            profile = _ADAPTER.validate_json(json.dumps(tree["profile"]))
            done = set(map(str, tree["done"]))
            steps = {
                str(unit): [
                    StepTimes(
                        forward=tuple(map(float, forward)),
                        backward=tuple(map(float, backward)),
                        optimizer=float(optimizer),
                    )
                    for forward, backward, optimizer in several
                ]
                for unit, several in tree["steps"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            logger().warning("%s cannot be read (%s); measuring again", self.path, type(error).__name__)
            return
        self.profile, self.done, self.steps = profile, done, steps

    def add(self, unit: str, profile: DeviceProfile) -> None:
        """Store the measurements of one unit of work."""
        self.profile = profile
        self.done.add(unit)
        self.steps.pop(unit, None)
        self.save()

    def save(self) -> None:
        if not self.keep:
            return
        tree: dict[str, Any] = {
            "done": sorted(self.done),
            "profile": _ADAPTER.dump_python(self.profile, mode="json"),
            "steps": {
                unit: [(step.forward, step.backward, step.optimizer) for step in several]
                for unit, several in self.steps.items()
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced atomically: a probe that is killed while writing leaves the old file.
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(tree), encoding="utf-8")
        part.replace(self.path)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
