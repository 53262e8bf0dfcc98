"""Have the model fill in an object: its text follows the type's schema token by token, and comes back parsed.

python examples/structured_output.py MODEL      (in a clone: pip install -e '.[structured]')
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

import asyncllm


@dataclass
class Review:
    """What the model is to fill in."""

    verdict: Literal["good", "mixed", "bad"]
    stars: Annotated[int, msgspec.Meta(ge=1, le=5)]
    reason: Annotated[str, msgspec.Meta(max_length=80)]


TEXT = "The soup was cold, but the view from the terrace made up for it."


async def main() -> None:
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        question = [{"role": "user", "content": f"Sum up this review as JSON: {TEXT}"}]
        async with llm.chat(question, schema=Review, seed=1) as stream:
            async for token in stream:
                print(token, end="", flush=True)
            review: Review = (await stream.completion()).parsed
        print(f"\n{review.stars} of 5 stars, {review.verdict}")

        phone = await llm.generate("Call me at", regex=r"\+[0-9]{2} [0-9]{3} [0-9]{4}", seed=1)
        colour = await llm.generate("Grass is", choice=["red", "green", "blue"], temperature=0)
        print(phone, colour)


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
