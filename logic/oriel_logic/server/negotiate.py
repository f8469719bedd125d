"""Chooses the media type of an answer: proactive negotiation by `Accept` (RFC 9110, 12.5.1), q-values included."""

from collections.abc import Sequence

MAX_ACCEPT = 2048
MAX_RANGES = 64


def choose(accept: str, offered: Sequence[str]) -> str | None:
    """Return the media type of `offered` that the client prefers, None if it accepts none of them.

    accept: the header, "" if there was none.
    offered: best first; that order decides between equals. A header that cannot be parsed, or is longer than MAX_ACCEPT
        or MAX_RANGES, counts as absent.
    """
    if not offered:
        return None
    if accept in ("", "*/*") or accept == offered[0]:
        return offered[0]
    ranges = parsed(accept)
    if not ranges:
        return offered[0]
    liked = [(quality_of(each, ranges), -place, each) for place, each in enumerate(offered)]
    quality, _, best = max(liked)
    return best if quality > 0 else None


def parsed(accept: str) -> list[tuple[str, float]]:
    """Return (range, q) for every valid element; [] if there is none or too much."""
    if len(accept) > MAX_ACCEPT:
        return []
    elements = accept.split(",")
    if len(elements) > MAX_RANGES:
        return []
    found: list[tuple[str, float]] = []
    for element in elements:
        media, *parameters = (each.strip().lower() for each in element.split(";"))
        kind, _, subtype = media.partition("/")
        if not kind or not subtype or (kind == "*" and subtype != "*"):
            continue
        quality = quality_in(parameters)
        if quality is not None:
            found.append((media, quality))
    return found


def quality_in(parameters: Sequence[str]) -> float | None:
    """Return the q-value, 1 without one, None if it is not a number from 0 to 1."""
    for each in parameters:
        name, _, value = each.partition("=")
        if name.strip() == "q":
            text = value.strip()
            if not text.replace(".", "", 1).isdecimal() or not text.isascii() or len(text) > 5:
                return None
            return quality if (quality := float(text)) <= 1 else None
    return 1.0


def quality_of(media: str, ranges: Sequence[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that covers `media`; 0 if none does."""
    kind = media.partition("/")[0]
    for wanted in (media, f"{kind}/*", "*/*"):
        qualities = [quality for each, quality in ranges if each == wanted]
        if qualities:
            return max(qualities)
    return 0.0
