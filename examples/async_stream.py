"""Two streams on one engine; the second is left early, which aborts it."""

from __future__ import annotations

import asyncio

from pagedcore import AsyncEngine, SamplingParams


async def whole(engine: AsyncEngine) -> None:
    async for output in engine.generate("The three primary colours are", SamplingParams(temperature=0, max_tokens=16)):
        print(output.text, end="", flush=True)
    print()


async def first_words(engine: AsyncEngine) -> None:
    async for output in engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=200)):
        if len(output.outputs[0].token_ids) >= 8:
            break


async def main() -> None:
    engine = AsyncEngine()
    await asyncio.gather(whole(engine), first_words(engine))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
