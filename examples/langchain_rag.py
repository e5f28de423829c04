"""A LangChain chain with a retriever (LCEL) on an engine in this process.

The documents stand in front of the question, in a fixed order: two questions about the same documents begin alike, and the second
finds the first one's documents in the prefix cache.
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from pagedcore_adapters.langchain_chat import ChatPagedCore

LIBRARY = (
    "The Nordlys lighthouse was built in 1898 on the island of Skarv. Its lamp is 32 metres above the sea.",
    "The keeper of the Nordlys lighthouse was Ingrid Dahl. She kept its lamp burning for forty years.",
    "The village of Ostrava bay has a fish market on Fridays. Its church is made of wood.",
)
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question in one sentence, from these notes only:\n{notes}"), ("user", "{question}")]
)


class SharedWords(BaseRetriever):
    """The documents that share most words with the question, always in the order of the library."""

    documents: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        asked = set(_words(query))
        ranked = sorted(self.documents, key=lambda document: -len(asked & set(_words(document.page_content))))
        chosen = ranked[: self.k]
        return [document for document in self.documents if document in chosen]


def _words(text: str) -> list[str]:
    return [word.strip(".,?!") for word in text.lower().split()]


def as_notes(documents: list[Document]) -> str:
    return "\n".join(f"- {document.page_content}" for document in documents)


def make_chain(chat: ChatPagedCore) -> Runnable[str, Any]:
    """From a question to a message."""
    retriever = SharedWords(documents=[Document(text) for text in LIBRARY])
    return {"notes": retriever | as_notes, "question": RunnablePassthrough()} | PROMPT | chat


def main() -> None:
    chain = make_chain(ChatPagedCore(temperature=0, max_tokens=40))
    for question in ("When was the Nordlys lighthouse built?", "Who was the keeper of the Nordlys lighthouse?"):
        reply: AIMessage = chain.invoke(question)
        usage = reply.usage_metadata
        print(f"{question}\n  {reply.content}")
        if usage is not None:
            print(f"  {usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
