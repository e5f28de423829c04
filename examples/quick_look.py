# %% [markdown]
# # A quick look at the cache
#
# Prompts that begin alike share the KV blocks of that beginning. The cells below send some, and ask where each prompt's tokens came
# from, why blocks were missed, and what another pool or block size would have done. They run in Jupyter, VS Code or Spyder, or all at
# once: `python examples/quick_look.py`.

# %% An engine in this process; no model named is the embedded one.
from pagedcore import LLM, SamplingParams

llm = LLM(block_size=16)
params = SamplingParams(temperature=0, max_tokens=12)

# %% Eight questions behind two instructions.
SURE = "If you are not sure, say that you are not sure."
INSTRUCTIONS = {
    "teacher": f"You are a patient geography teacher. Answer in one short sentence that names the capital and nothing else. {SURE}",
    "guide": f"You are a cheerful tourist guide. Answer in one short sentence that names the capital and one sight. {SURE}",
}
COUNTRIES = ("France", "Japan", "Egypt", "Kenya")


def conversation(role: str, country: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS[role]}, {"role": "user", "content": f"What is the capital of {country}?"}]


before = llm.stats()
asked = [(role, country) for role in INSTRUCTIONS for country in COUNTRIES]
outputs = [llm.chat(conversation(*one), params)[0] for one in asked]

# %% Where each prompt's tokens came from. `out.cache` is exact: live + pool + host + computed + abandoned is the prompt.
print(f"{'':>16}  prompt  cached  computed  missed blocks")
for (role, country), out in zip(asked, outputs, strict=True):
    report = out.cache
    missed = ", ".join(f"{count} {reason}" for reason, count in report.miss_blocks.items()) or "none"
    print(f"{role:>8} {country:>7}  {report.num_prompt_tokens:6}  {report.num_cached_tokens:6}  {report.computed_tokens:8}  {missed}")

# %% Where a prompt left the nearest cached one, and how it goes on there.
tokenizer = llm.get_tokenizer()
for (role, country), out in zip(asked, outputs, strict=True):
    where = out.cache.diverged_at_token
    if where is not None:
        rest = tokenizer.decode(out.prompt_token_ids[where:])
        print(f"{role:>8} {country:>7}  at token {where:2}: {rest[:40]!r}...")

# %% The numbers of the whole engine. Two snapshots subtract to what happened between them.
stats = llm.stats() - before
for level in ("page", "prefix", "pool"):
    print(f"{level:>6} hit rate: {stats.hit_rate(level):.3f}")
print(f" ideal hit rate: {stats.ideal_hit_rate:.3f} (an unbounded cache on the same traffic)")
print(f"missed blocks by reason: {dict(stats.miss_blocks)}")
print(f"blocks: {stats.num_active_blocks} active, {stats.num_cached_blocks} cached, {stats.num_free_blocks} free")

# %% Advice needs a little traffic: the same questions once more, then what other settings would have done.
llm.chat([conversation(*one) for one in asked], params)
advice = llm.advice()
for sentence in advice.sentences:
    print(f"- {sentence}")
for point in advice.curve:
    if point.pool_factor == 1.0:
        print(f"block_size {point.block_size:3}: hit rate {point.hit_rate:.3f}")

# %% Give the memory back.
llm.close()
