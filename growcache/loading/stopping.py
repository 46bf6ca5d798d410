"""How what runs ahead is told that nobody wants it any more."""


class StoppedError(Exception):
    """What runs ahead was asked to end; no user sees it."""
