"""What `pagedcore serve` prints: where the endpoint is and how to talk to it."""

from __future__ import annotations

from pagedcore.http.address import base_url


def greeting(host: str, port: int, model_name: str, *, needs_key: bool) -> str:
    """A text with one curl call and one call of the openai client; both work as they stand, given the key."""
    base = base_url(host, port)
    auth = ' -H "Authorization: Bearer $PAGEDCORE_API_KEY"' if needs_key else ""
    key = 'os.environ["PAGEDCORE_API_KEY"]' if needs_key else '"none"'
    imports = "import os; from openai import OpenAI" if needs_key else "from openai import OpenAI"
    return f"""\
pagedcore serves {model_name} at {base}/v1. Talk to it:

  curl {base}/v1/chat/completions -H "Content-Type: application/json"{auth} \\
    -d '{{"model": "{model_name}", "temperature": 0, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  {imports}  # pip install openai
  client = OpenAI(base_url="{base}/v1", api_key={key})
  reply = client.chat.completions.create(
      model="{model_name}", temperature=0, messages=[{{"role": "user", "content": "What is the capital of France?"}}])
  print(reply.choices[0].message.content)

Live page: {base}/ui    Metrics: {base}/metrics    Readiness: {base}/ready    Stop: Ctrl-C
"""
