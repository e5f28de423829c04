"""Text of the real tokenizer: streams join to the whole, stop strings end it wherever token borders fall."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pagedcore import LLM, RequestOutput, SamplingParams
from pagedcore.text.tokenizer import Tokenizer
from support.parity import real_llm

pytestmark = [pytest.mark.model, pytest.mark.slow]

BROKEN = "\ufffd"
STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WILD = SamplingParams(temperature=1.6, max_tokens=24, ignore_eos=True)
PROMPTS = [
    "😀 🎉 🚀 😀 🎉 🚀",
    "🤗",
    "👩‍👩‍👧‍👦 👩‍👩‍👧‍👦",
    "东京是日本的首都。",
    "こんにちは、世界",
    "안녕하세요",
    "Привет, мир!",
    "สวัสดี",
    "naïve café, 5 € —",
    STORY,
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with real_llm() as made:
        yield made


@pytest.fixture(scope="module")
def story(llm: LLM) -> RequestOutput:
    """A greedy continuation in plain English, to cut up."""
    (output,) = llm.generate(STORY, GREEDY)
    assert output.outputs[0].text.isascii()
    assert len(output.outputs[0].text) > 40
    return output


async def stream_all(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[RequestOutput]]:
    async def one(prompt: str, own: SamplingParams) -> list[RequestOutput]:
        return [output async for output in llm.engine.generate(prompt, own)]

    return await asyncio.gather(*(one(prompt, own) for prompt, own in zip(prompts, params, strict=True)))


def check_stream(outputs: list[RequestOutput], whole: RequestOutput) -> None:
    """Cumulative outputs that grow to the whole, token by token and character by character."""
    text, token_ids = "", []
    for output in outputs:
        choice = output.outputs[0]
        text += output.text
        token_ids += choice.new_token_ids
        assert choice.text == text
        assert choice.token_ids == token_ids
    assert text == whole.outputs[0].text
    assert token_ids == whole.outputs[0].token_ids
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == whole.outputs[0].finish_reason


def test_streamed_text_equals_whole_text_and_what_the_tokenizer_decodes(llm: LLM) -> None:
    params = [own.replace(seed=index) for own in (GREEDY, WILD) for index in range(len(PROMPTS))]
    prompts = PROMPTS * 2
    whole = llm.generate(prompts, params)
    streams = asyncio.run(stream_all(llm, prompts, params))
    tokenizer = llm.get_tokenizer()
    for output, outputs in zip(whole, streams, strict=True):
        check_stream(outputs, output)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert sum(len(output.outputs[0].text) < sum(map(len, _token_texts(tokenizer, output))) for output in whole) > 5, (
        "characters of several tokens"
    )


def _token_texts(tokenizer: Tokenizer, output: RequestOutput) -> list[str]:
    return [tokenizer.token_text(token) for token in output.outputs[0].token_ids]


def test_a_character_of_several_tokens_is_never_shown_in_parts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for character in ("🚀", "€", "京", "ไ"):
        token_ids = tokenizer.encode(character, add_special_tokens=False)
        # Biased so that the model can only spell the character, again and again.
        params = GREEDY.replace(max_tokens=9, logit_bias=dict.fromkeys(token_ids, 100.0))
        outputs = list(llm.engine.generate_sync(character * 3, params))
        complete = "".join(output.text for output in outputs)
        assert complete == tokenizer.decode(outputs[-1].outputs[0].token_ids)
        assert complete.count(BROKEN) == tokenizer.decode(outputs[-1].outputs[0].token_ids).count(BROKEN)
        assert all(BROKEN not in output.text for output in outputs[:-1]) or BROKEN in complete.rstrip(BROKEN)


def border_stops(llm: LLM, story: RequestOutput) -> list[str]:
    """A stop string over each border of two tokens of the story, and some over three and four."""
    pieces = _token_texts(llm.get_tokenizer(), story)
    pairs = [pieces[i][-2:] + pieces[i + 1][:3] for i in range(1, 10)]
    return [*pairs, "".join(pieces[2:5])[1:-1], "".join(pieces[3:7])[1:-1]]


def expected_ending(tokenizer: Tokenizer, story: RequestOutput, stop: str) -> tuple[str, list[int]]:
    """The text before the stop string, and the tokens up to the one that completes it."""
    choice = story.outputs[0]
    num_tokens = next(count for count in range(1, 17) if stop in tokenizer.decode(choice.token_ids[:count]))
    return choice.text[: choice.text.index(stop)], choice.token_ids[:num_tokens]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_wherever_token_borders_fall(llm: LLM, story: RequestOutput, include: bool) -> None:
    stops = border_stops(llm, story)
    params = [GREEDY.replace(stop=stop, include_stop_str_in_output=include) for stop in stops]
    whole = llm.generate([STORY] * len(stops), params)
    streams = asyncio.run(stream_all(llm, [STORY] * len(stops), params))
    for stop, output, outputs in zip(stops, whole, streams, strict=True):
        text, token_ids = expected_ending(llm.get_tokenizer(), story, stop)
        choice = output.outputs[0]
        assert choice.text == text + (stop if include else "")
        assert choice.token_ids == token_ids
        assert (choice.finish_reason, choice.stop_reason, output.status) == ("stop", stop, "completed")
        check_stream(outputs, output)
        assert outputs[-1].outputs[0].stop_reason == stop


def test_the_earliest_of_several_stop_strings_wins_and_one_that_never_comes_costs_no_text(llm: LLM, story: RequestOutput) -> None:
    text = story.outputs[0].text
    early, late = text[9:13], text[25:30]
    never = text[-3:] + "#"  # its beginning is held back to the end
    both, none = llm.generate([STORY] * 2, [GREEDY.replace(stop=[late, early]), GREEDY.replace(stop=[never])])
    assert (both.outputs[0].text, both.outputs[0].stop_reason) == (text[: text.index(early)], early)
    assert (none.outputs[0].text, none.outputs[0].finish_reason, none.outputs[0].stop_reason) == (text, "length", None)


def test_tokens_past_a_stop_string_are_counted_as_discarded_and_nowhere_else(llm: LLM, story: RequestOutput) -> None:
    before = llm.stats()
    (output,) = llm.generate(STORY, GREEDY.replace(stop=story.outputs[0].text[9:13]))
    llm.check()
    during = llm.stats() - before
    assert during.generation_tokens == len(output.outputs[0].token_ids)
    assert during.sampled_tokens == during.generation_tokens + during.discarded_tokens


def test_n_choices_stream_and_stop_each_on_its_own(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=5, n=4, max_tokens=24, stop=("the", "."), ignore_eos=True)
    (whole,) = llm.generate(STORY, params)
    outputs = list(llm.engine.generate_sync(STORY, params))
    for index, choice in enumerate(whole.outputs):
        assert "".join(output.outputs[index].new_text for output in outputs) == choice.text
        assert outputs[-1].outputs[index].token_ids == choice.token_ids
        assert "the" not in choice.text
        assert "." not in choice.text
        assert choice.finish_reason == ("stop" if choice.stop_reason else "length")
        assert choice.stop_reason in ("the", ".", None)
    assert {choice.stop_reason for choice in whole.outputs} & {"the", "."}


def test_without_detokenizing_there_are_tokens_and_no_text(llm: LLM, story: RequestOutput) -> None:
    (output,) = llm.generate(STORY, GREEDY.replace(detokenize=False))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", story.outputs[0].token_ids)


def test_special_tokens_are_in_the_text_only_when_asked_for(llm: LLM) -> None:
    forced = GREEDY.replace(max_tokens=2, logit_bias={1: 100.0})
    hidden, shown = llm.generate([STORY] * 2, [forced, forced.replace(skip_special_tokens=False)])
    assert hidden.outputs[0].token_ids == shown.outputs[0].token_ids == [1, 1]
    assert (hidden.outputs[0].text, shown.outputs[0].text) == ("", "<|im_start|><|im_start|>")
