"""Ask 200 questions at once about one text; the shared beginning is computed once and reused from the prefix cache.

python examples/fan_out.py MODEL
"""

import asyncio
import sys
import time

import asyncllm

TEXT = (
    "The harbour of Elvik opens to the west. In winter the ferry runs twice a day, in summer every hour, and on feast "
    "days not at all. The lighthouse was built in 1871 by two sisters, who sold their fishing boats to pay for it.\n"
)


async def main() -> None:
    async with asyncllm.AsyncLLM(sys.argv[1]) as llm:
        begun = time.perf_counter()
        prompts = [f"{TEXT}Question {i}: what is the number {i} good for in Elvik?\nAnswer:" for i in range(200)]
        await llm.generate(TEXT, max_tokens=1)  # fills the cache, so that all 200 find the text in it
        answers = await asyncio.gather(*(llm.generate(p, max_tokens=16, temperature=0) for p in prompts))
        took = time.perf_counter() - begun

    prompt_tokens = sum(a.usage.prompt_tokens for a in answers)
    cached_tokens = sum(a.usage.cached_tokens for a in answers)
    print(answers[7].text.strip())
    print(f"{len(answers)} answers in {took:.1f} s")
    print(f"{cached_tokens / prompt_tokens:.0%} of the prompt tokens came from the cache")


if len(sys.argv) != 2:
    sys.exit(__doc__)
asyncllm.run(main)
