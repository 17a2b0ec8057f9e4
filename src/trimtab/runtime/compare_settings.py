"""The settings file of `trimtab compare`: what to train, and how its gradients travel. Strict, YAML."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimtab.bench.ranks import parse_rate
from trimtab.cluster.file import StrictLoader
from trimtab.errors import TrimtabError

_MAX_BYTES = 64 * 1024


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NoCodec(_Strict):
    """Plain DDP."""

    kind: Literal["none"]


class Default(_Strict):
    """`trimtab.compress(ddp)`: measures the link and decides, also whether to compress at all."""

    kind: Literal["default"]


class AdaptiveCodec(_Strict):
    """Bits chosen while training runs, whether or not that pays here."""

    kind: Literal["adaptive"]
    family: Literal["bits", "bits-feedback", "bits-scaled"] | None = None
    policy: Literal["dynamic", "uniform", "linear", "kmeans", "search"] = "dynamic"
    warmup: int = Field(default=20, ge=1)
    period: int = Field(default=100, ge=1)


class BlockCodec(_Strict):
    """The same bits for every layer."""

    kind: Literal["block"]
    bits: int = Field(default=4, ge=1, le=8)
    block: int = Field(default=1024, ge=8)
    stochastic: bool = True
    error_feedback: bool = False


class PowerSGDCodec(_Strict):
    kind: Literal["powersgd"]
    rank: int = Field(default=4, ge=1)


class TopKCodec(_Strict):
    kind: Literal["topk"]
    density: float = Field(default=0.01, gt=0, le=1)
    error_feedback: bool = True


Codecs = NoCodec | Default | AdaptiveCodec | BlockCodec | PowerSGDCodec | TopKCodec
_KINDS: dict[str, type[_Strict]] = {
    "none": NoCodec,
    "default": Default,
    "adaptive": AdaptiveCodec,
    "block": BlockCodec,
    "powersgd": PowerSGDCodec,
    "topk": TopKCodec,
}


class Settings(_Strict):
    """One side of a comparison."""

    codec: Annotated[Codecs, Field(discriminator="kind")]
    model: Literal["gpt-small", "gpt5m", "gpt25m"] = "gpt-small"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.1, gt=0)
    steps: int = Field(default=100, ge=2)
    seed: int = Field(default=0, ge=0)
    world: int = Field(default=2, ge=2, le=16)
    link: str | None = None
    """1gbit, 100mbit, ...; none for an unshaped one."""


def load_settings(path: str | Path) -> Settings:
    """Read a settings file, refusing anything that is not exactly in the form of `Settings`.

    Raises:
        TrimtabError: naming the file, the place inside it, and the remedy.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TrimtabError(f"{path}: larger than {_MAX_BYTES >> 10} KiB; is this a settings file?")
        tree = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text; is this a settings file?") from None
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise TrimtabError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise TrimtabError(f"{path}: holds {tree!r:.60} where a mapping with the key codec is due")
    if isinstance(tree.get("codec"), str):
        tree = {**tree, "codec": {"kind": tree["codec"]}}  # a kind alone, with its defaults
    try:
        settings = Settings.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        said = "; ".join(_say(each, tree) for each in error.errors()[:5])
        raise TrimtabError(f"{path}: {said}") from None
    if settings.link is not None:
        try:
            parse_rate(settings.link)
        except TrimtabError as error:
            raise TrimtabError(f"{path}: link: {error}") from None
    return settings


def _say(error: Any, tree: dict[str, Any]) -> str:
    # pydantic puts the kind of a codec into the place, where the file has nothing.
    parts = [str(part) for i, part in enumerate(error["loc"]) if not (i == 1 and error["loc"][0] == "codec")]
    place, kind = ".".join(parts), error["type"]
    if kind == "extra_forbidden":
        known = _fields(parts, tree)
        close = get_close_matches(parts[-1], known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{place}: unknown key; {remedy}"
    if kind == "missing":
        return f"{place}: missing; add it"
    if kind == "union_tag_not_found":
        return f"{place}.kind: missing; write one of {', '.join(_KINDS)}"
    if kind == "union_tag_invalid":
        tag = str(error["ctx"]["tag"])
        close = get_close_matches(tag, _KINDS, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"choose {', '.join(_KINDS)}"
        return f"{place}.kind: there is no codec {tag!r}; {remedy}"
    return f"{place}: {error['msg'].removeprefix('Input ')}, not {error['input']!r:.60}"


def _fields(place: list[str], tree: dict[str, Any]) -> list[str]:
    if place[0] == "codec" and len(place) > 1:
        return list(_KINDS[tree["codec"]["kind"]].model_fields)
    return list(Settings.model_fields)
