"""What every contender is asked."""

import json

import numpy as np
from gateway_bench.contenders import PEERS, ROOT

__all__ = ["FILES", "picture"]

FILES = PEERS / "logic"


def picture() -> list[float]:
    """The 64 floats of a 7, as the example's v2 request has them."""
    document = json.loads((ROOT / "examples" / "digits" / "7.v2.json").read_text())
    return [float(value) for value in np.asarray(document["inputs"][0]["data"]).ravel()]
