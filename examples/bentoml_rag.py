"""Retrieval in front of the engine, as two BentoML services: `bentoml serve examples.bentoml_rag:Rag`, then POST /ask.

The documents that were found come first in the prompt, always in the same order: a question about the same ones finds them in the
prefix cache, and the answer says how many tokens that saved.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter

import bentoml
from pydantic import BaseModel

from pagedcore import EngineConfig
from pagedcore_adapters.bentoml_service import build_service, default_image

DOCUMENTS = {
    "opening": "The town library opens at nine in the morning from Monday to Friday. On Saturday it opens at ten. On Sunday it is closed.",
    "loans": "A reader may borrow six books at a time. A loan lasts four weeks and can be renewed twice, unless another reader waits.",
    "fines": "A book that comes back late costs twenty cents for each day. Children under twelve years of age pay no fines at all.",
    "rooms": "The reading room has forty desks and is silent. The two group rooms hold eight people each and are reserved at the counter.",
    "music": "Records and sheet music are on the second floor, where headphones hang beside the piano. Ask there for the key.",
}
INSTRUCTION = "You answer questions about the town library in one short sentence, from these notes only."


def words(text: str) -> list[str]:
    """Without endings, so that `opens` finds `open`, and without single letters."""
    return [re.sub(r"(ed|es|s)$", "", word) for word in re.findall(r"[a-z]{2,}", text.lower())]


class Retriever:
    """Finds documents by BM25: rare words count more, and long documents do not win by their length."""

    def __init__(self, documents: dict[str, str]) -> None:
        self._counts = {name: Counter(words(text)) for name, text in documents.items()}
        self._mean_length = sum(counts.total() for counts in self._counts.values()) / len(documents)

    def best(self, question: str, num_documents: int = 2) -> list[str]:
        """The names of the best documents, in the order of the collection."""
        best = set(sorted(self._counts, key=lambda name: -self._score(question, name))[:num_documents])
        return [name for name in self._counts if name in best]

    def _score(self, question: str, name: str) -> float:
        counts = self._counts[name]
        norm = 1.2 * (0.25 + 0.75 * counts.total() / self._mean_length)
        return sum(self._rarity(word) * counts[word] * 2.2 / (counts[word] + norm) for word in set(words(question)))

    def _rarity(self, word: str) -> float:
        num_with = sum(word in counts for counts in self._counts.values())
        return math.log(1 + (len(self._counts) - num_with + 0.5) / (num_with + 0.5))


class Answer(BaseModel):
    """What came of a question, and what the prefix cache saved."""

    text: str
    sources: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int


engine = build_service(EngineConfig(max_num_seqs=64), name="engine")


@bentoml.service(name="rag", image=default_image(), runner_probe={"enabled": False})
class Rag:
    """Retrieves, then asks `engine`, which `bentoml serve` runs in a process of its own."""

    llm = bentoml.depends(engine)

    def __init__(self) -> None:
        self.retriever = Retriever(DOCUMENTS)

    async def __is_ready__(self) -> bool:
        """As the engine is. BentoML's own probe of it hangs while the model is loaded, and is switched off above."""
        try:
            return await asyncio.wait_for(self.llm.is_ready(), timeout=2)
        except (TimeoutError, OSError):
            return False

    @bentoml.api
    async def ask(self, question: str, max_tokens: int = 40) -> Answer:
        """Answer a question from the documents."""
        sources = self.retriever.best(question)
        notes = "\n".join(DOCUMENTS[name] for name in sources)
        messages = [{"role": "system", "content": f"{INSTRUCTION}\n{notes}"}, {"role": "user", "content": question}]
        reply = await self.llm.chat(messages, max_tokens=max_tokens, temperature=0.0)
        return Answer(
            text=reply.text,
            sources=sources,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_cached_tokens=reply.num_cached_tokens,
        )
