"""Why an object brought nothing, in a line that names it."""

from __future__ import annotations

import re

from growcache.config import Config
from growcache.remote.formats import is_user_format
from growcache.usercode import printable, short

MAX_REASON = 300  # characters; a hole's reason is kept in the index


def reason(key: str, why: object) -> str:
    """Return the line: it names the object once, a long key by its end.

    What raises mostly names the object itself, formats by its key, stores by its URL.

    >>> reason("a.npy", "a.npy: expected an .npy file")
    'a.npy: expected an .npy file'
    >>> reason("a.npy", "it holds no sample")
    'a.npy: it holds no sample'
    """
    name = short(key)
    text = printable(str(why) if name == key else str(why).replace(key, name))
    if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
        text = f"{name}: {text}"
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"


def suspects(config: Config) -> str:
    """Ask what may have ended a sampler: the user's code, as far as there is any."""
    named = [config.sampling.transform]
    for form, options in [one for source in config.sources for one in source.formats]:
        named += [str(options.get("decode")), form]
    code = " or ".join(dict.fromkeys(name for name in named if name and is_user_format(name)))
    return "; " + (f"does {code} crash, or " if code else "") + "is there too little memory?"
