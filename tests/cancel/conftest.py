from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm import AsyncLLM
from tests.support.scripted import letters_llm


@pytest.fixture(scope="module")
async def llm(anyio_backend: Any) -> AsyncIterator[AsyncLLM]:
    """One engine per module and event loop; each test leaves it empty. A step takes long enough to wait for each token."""
    async with letters_llm({"step_ms": 2}) as llm:
        yield llm
