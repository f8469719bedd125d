"""Documents that never end take steps by their length."""

from contextlib import suppress

import pytest

from oriel_policies.documents import compile_documents
from oriel_policies.errors import PolicyError

from ..steps import linear

TIER = "[tiers.gold]\nband = 0\ntarget_ms = 100\n"


@pytest.mark.parametrize(
    "text",
    ["a.", "[", "[[", '"', '"""', "x = [", "x = {a = ", "# ", "=", "\n", "[a]\n", "x%d = 1\n", "[tenants.t%d]\n", "\\"],
)
def test_a_document(text: str) -> None:
    def work(size: int) -> None:
        whole = "".join(text % number if "%d" in text else text for number in range(size))
        with suppress(PolicyError):
            compile_documents({"all.toml": (TIER + whole).encode()})

    linear(work, (200, 400, 800))
