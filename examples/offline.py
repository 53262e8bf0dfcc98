"""No event loop: give a list of prompts, wait for the list of answers, with a progress bar.

python examples/offline.py MODEL
"""

import sys

from asyncllm import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

PROMPTS = [f"The square of {number} is" for number in range(2, 34)]

with LLM(sys.argv[1]) as llm:
    for prompt, done in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8)), strict=True):
        print(f"{prompt}{done.text!r}")
