"""Stop strings in a stream: text is held back while it may still turn out to be the start of one."""

from __future__ import annotations


class StopText:
    """Pass text on until one of `stops` appears; the stop string itself and what follows never come out."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take new text and return what can safely be shown."""
        if self.found:
            return ""
        self.held += text
        places = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self.held = self.held[: min(places)], ""
            return shown
        keep = self._possible_start()
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        shown, self.held = self.held, ""
        return shown

    def _possible_start(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        lengths = range(min(len(self.held), max(map(len, self.stops), default=0)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.held[-n:]) for stop in self.stops)), 0)
