"""One conversation on its way through the engine, and its answer as LangChain's messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import ToolCallChunk, default_tool_parser, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from pagedcore import CompletionOutput, RequestOutput
from pagedcore.client import TextFront
from pagedcore.tools.answer import Answer, AnswerParser
from pagedcore.tools.messages import TemplateArguments, render
from pagedcore.tools.objects import message_of
from pagedcore.tools.parts import CallPart, Part, TextPart
from pagedcore_adapters._langchain_call import Call, usage
from pagedcore_adapters._langchain_messages import chat_message


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation: its prompt, and how the answer is read."""

    call: Call
    prompt: str
    answer: Answer

    def invoke(self) -> ChatResult:
        """The whole answer."""
        return self._result(self.call.collect(self.prompt))

    async def ainvoke(self) -> ChatResult:
        return self._result(await self.call.acollect(self.prompt))

    def stream(self) -> Generator[ChatGenerationChunk]:
        """The answer as it comes; closing the generator aborts the request."""
        parser = self.answer.parser(self.prompt)
        with closing(self.call.stream(self.prompt)) as outputs:
            for output in outputs:
                yield from self._chunks(parser, output)

    async def astream(self) -> AsyncGenerator[ChatGenerationChunk]:
        """The same on the running event loop."""
        parser = self.answer.parser(self.prompt)
        async with aclosing(self.call.astream(self.prompt)) as outputs:
            async for output in outputs:
                for chunk in self._chunks(parser, output):
                    yield chunk

    def _result(self, output: RequestOutput) -> ChatResult:
        generations = [self._generation(output, choice) for choice in output.outputs]
        return ChatResult(generations=generations, llm_output={"model_name": self.call.model_name})

    def _generation(self, output: RequestOutput, choice: CompletionOutput) -> ChatGeneration:
        parser = self.answer.parser(self.prompt)
        said = message_of(parser.push(choice.text, is_last=True), "assistant")
        calls, invalid_calls = default_tool_parser(said.get("tool_calls", []))
        reason = _finish_reason(parser, choice)
        message = AIMessage(
            content=said["content"] or "",
            additional_kwargs={name: said[name] for name in ("reasoning_content",) if name in said},
            tool_calls=calls,
            invalid_tool_calls=invalid_calls,
            usage_metadata=usage(output),
            response_metadata=self.call.metadata(output, choice.index) | reason,
        )
        return ChatGeneration(message=message, generation_info=reason)

    def _chunks(self, parser: AnswerParser, output: RequestOutput) -> list[ChatGenerationChunk]:
        """None while it is not certain yet what the new text is; the last one has what belongs to the whole answer."""
        fields = _chunk_fields(parser.push(output.text, is_last=output.finished))
        if not output.finished:
            return [ChatGenerationChunk(message=AIMessageChunk(**fields))] if fields["content"] or len(fields) > 1 else []
        reason = _finish_reason(parser, output.outputs[0])
        message = AIMessageChunk(
            **fields,
            usage_metadata=usage(output),
            response_metadata=self.call.metadata(output) | reason,
            chunk_position="last",
        )
        return [ChatGenerationChunk(message=message, generation_info=reason)]


def make_prompt(messages: Sequence[BaseMessage], text: TextFront, answer: Answer, template_kwargs: dict[str, Any]) -> str:
    """The text that the model continues. Raises `RequestError` for messages and template arguments that cannot be used."""
    arguments = TemplateArguments(chat_template_kwargs=template_kwargs)
    return render(arguments, [chat_message(message) for message in messages], text, answer.shown_tools)


def _finish_reason(parser: AnswerParser, choice: CompletionOutput) -> dict[str, Any]:
    """An answer that calls ends with the calls."""
    ends_with_calls = choice.finish_reason == "stop" and parser.has_calls
    return {"finish_reason": "tool_calls" if ends_with_calls else choice.finish_reason}


def _chunk_fields(parts: Sequence[Part]) -> dict[str, Any]:
    texts = [part for part in parts if isinstance(part, TextPart)]
    calls = _call_chunks([part for part in parts if isinstance(part, CallPart)])
    reasoning = "".join(part.text for part in texts if part.is_reasoning)
    fields: dict[str, Any] = {"content": "".join(part.text for part in texts if not part.is_reasoning)}
    if reasoning:
        fields["additional_kwargs"] = {"reasoning_content": reasoning}
    if calls:
        fields["tool_call_chunks"] = calls
    return fields


def _call_chunks(parts: Sequence[CallPart]) -> list[ToolCallChunk]:
    """One for each call: LangChain joins those of different messages only."""
    chunks: dict[int, ToolCallChunk] = {}
    for part in parts:
        chunk = chunks.setdefault(part.index, tool_call_chunk(name=part.name, args="", id=part.call_id, index=part.index))
        chunk["args"] = (chunk["args"] or "") + part.arguments
    return list(chunks.values())
