"""Regular expressions of the string formats that JSON schemas name: a part of each one's texts, without `<`."""

from __future__ import annotations

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Days of the calendar: any day of a year but 0000, and February 29 of a leap year.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_FOURTHS = "(0[48]|[2468][048]|[13579][26])"
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_MANY = "[0-9]{1,9}"
_LASTING = f"T({_MANY}H({_MANY}M({_MANY}S)?)?|{_MANY}M({_MANY}S)?|{_MANY}S)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_GROUP = "[0-9a-f]{1,4}"

RAW_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_MANY}W|{_MANY}D({_LASTING})?|{_LASTING})",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}:{_GROUP}|::({_GROUP})?",
    "uri": r"[a-z][a-z0-9+.-]*:\/\/([a-zA-Z0-9._~:\/?#@!$&'()*+,;=-]|%[0-9A-F]{2})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
