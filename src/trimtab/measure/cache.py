"""What was measured on a device before, kept between runs: an interrupted probe goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trimtab.cluster.profile import DeviceProfile
from trimtab.environment import logger
from trimtab.measure.operators import StepTimes

_ADAPTER: TypeAdapter[DeviceProfile] = TypeAdapter(DeviceProfile)


def cache_folder() -> Path:
    """Where measurements are kept: in the user's cache folder, as XDG says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trimtab", "probe")


class ProbeCache:
    """The measurements of one device under one torch and one trimtab.

    Args:
        called: what the driver or the operating system calls the device.
        conditions: what else times depend on: threads, a share of the device.
        keep: whether anything is read or written; an emulated device is gone with its emulation.
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
        self.path = (folder or cache_folder()) / f"{name}.json"
        self.profile = DeviceProfile(called=called)
        self.done: set[str] = set()
        self.steps: dict[str, list[StepTimes]] = {}
        """Timed steps of units that are not done."""

        self.keep = keep

    def load(self) -> None:
        """Take over what an earlier run measured; a file that cannot be read is measured anew."""
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
                        optimiser=float(optimiser),
                    )
                    for forward, backward, optimiser in several
                ]
                for unit, several in tree["steps"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            logger().warning("%s cannot be read (%s); measuring anew", self.path, type(error).__name__)
            return
        self.profile, self.done, self.steps = profile, done, steps

    def add(self, unit: str, profile: DeviceProfile) -> None:
        """Keep what one unit of work has measured."""
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
                unit: [(step.forward, step.backward, step.optimiser) for step in several]
                for unit, several in self.steps.items()
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced as a whole: a probe that is killed while writing leaves the old file.
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(tree), encoding="utf-8")
        part.replace(self.path)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
