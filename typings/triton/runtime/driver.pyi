from typing import Any

driver: Any
