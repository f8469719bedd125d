"""The `oriel` command: dispatch, the supervisor behind `oriel up`, the local trace buffer, the demo.

Refuses a Python that this version was not tried with before anything else is imported: what would fail there is a
traceback out of some package. This file is plain enough for every Python 3.
"""

import sys

OLDEST = (3, 11)
NEWEST = (3, 14)

if not OLDEST <= sys.version_info[:2] <= NEWEST:
    sys.exit(
        "oriel: this is Python {}.{}, which this version was not tried with: install Python {}.{} to {}.{}".format(
            *sys.version_info[:2], *OLDEST, *NEWEST
        )
    )
