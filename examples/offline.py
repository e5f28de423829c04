"""Many prompts at once, offline. The second call finds the shared instruction in the prefix cache."""

from __future__ import annotations

from pagedcore import LLM, SamplingParams

INSTRUCTION = "You are a patient geography teacher. Answer in one short sentence and name the capital only. "


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM() as llm:
        for countries in (["France", "Germany"], ["Japan", "Egypt"]):
            conversations = [[{"role": "user", "content": f"{INSTRUCTION}What is the capital of {country}?"}] for country in countries]
            for country, output in zip(countries, llm.chat(conversations, params), strict=True):
                print(f"{country}: {output.outputs[0].text} [{output.num_cached_tokens} cached tokens]")
        print(f"prefix hit rate: {llm.stats().hit_rate('prefix'):.2f}")


if __name__ == "__main__":
    main()
