"""Chains of LangChain's expression language around the models: a retriever before, a parser behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from pagedcore import AsyncEngine
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from support.fake_engine import ANSWER, FakeLoop, make_fake_engine

NOTES = {"ulm": "Ulm has a tall church.", "paris": "Paris has a tower."}
KINDS = pytest.mark.parametrize("kind", ["chat", "text"])


class Notes(BaseRetriever):
    """Finds the notes on the towns that a question names."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(note) for town, note in NOTES.items() if town in query]


@pytest.fixture
def gathered(tmp_path: Path) -> Iterator[tuple[AsyncEngine, FakeLoop]]:
    """Makes its first step when 16 requests run at once."""
    engine, loop = make_fake_engine(tmp_path, gather=16)
    yield engine, loop
    engine.close_sync()


def make_chain(engine: AsyncEngine, kind: str) -> Runnable[str, str]:
    def joined(documents: list[Document]) -> str:
        return " ".join(document.page_content for document in documents)

    asked: Any = {"notes": Notes() | joined, "question": RunnablePassthrough()}
    template: Any = (ChatPromptTemplate if kind == "chat" else PromptTemplate).from_template("{notes} {question}")
    model: Any = ChatPagedCore(engine=engine, max_tokens=5) if kind == "chat" else PagedCoreLLM(engine=engine, max_tokens=5)
    chain: Runnable[str, str] = asked | template | model | StrOutputParser()
    return chain


def prompts(loop: FakeLoop) -> list[str]:
    return [loop.text.decode(request.prompt_token_ids) for request in loop.requests]


@KINDS
def test_what_the_retriever_found_stands_in_the_prompt(tmp_path: Path, kind: str) -> None:
    engine, loop = make_fake_engine(tmp_path)
    assert make_chain(engine, kind).invoke("Tell me of ulm.") == ANSWER[:5]
    assert "Ulm has a tall church. Tell me of ulm." in prompts(loop)[0]
    assert "Paris" not in prompts(loop)[0]
    engine.close_sync()


@KINDS
def test_a_chain_streams(tmp_path: Path, kind: str) -> None:
    engine, _ = make_fake_engine(tmp_path)
    assert "".join(make_chain(engine, kind).stream("Tell me of paris.")) == ANSWER[:5]
    engine.close_sync()


@KINDS
def test_a_batch_of_a_chain_with_a_retriever_is_one_engine_batch(gathered: tuple[AsyncEngine, FakeLoop], kind: str) -> None:
    engine, loop = gathered
    replies = make_chain(engine, kind).batch([f"{number}: of {town}" for number in range(8) for town in NOTES])
    assert replies == [ANSWER[:5]] * 16
    assert loop.batch_sizes[0] == 16


@pytest.mark.asyncio
@KINDS
async def test_an_async_batch_of_it_too(gathered: tuple[AsyncEngine, FakeLoop], kind: str) -> None:
    engine, loop = gathered
    replies = await make_chain(engine, kind).abatch([f"{number}: of {town}" for number in range(8) for town in NOTES])
    assert replies == [ANSWER[:5]] * 16
    assert loop.batch_sizes[0] == 16
