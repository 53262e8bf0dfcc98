from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def libraries() -> None:
    """No compiled CPU kernels are needed here."""
