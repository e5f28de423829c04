"""A LangChain chain on an engine in this process; the batch is one engine batch."""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from pagedcore_adapters.langchain_chat import ChatPagedCore


def main() -> None:
    chat = ChatPagedCore(max_tokens=16, temperature=0)
    chain = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | chat | StrOutputParser()
    for answer in chain.batch([{"country": country} for country in ("France", "Japan", "Egypt")]):
        print(answer)
    print(f"prefix hit rate: {chat.stats().hit_rate('prefix'):.2f}")


if __name__ == "__main__":
    main()
