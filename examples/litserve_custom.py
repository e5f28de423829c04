"""An endpoint of your own on LitServe, batched by pagedcore: `python examples/litserve_custom.py [port]`.

curl -d '{"html": "<p>My card was <b>stolen</b>, please block it.</p>"}' -H 'Content-Type: application/json' http://127.0.0.1:8000/summarize
"""

from __future__ import annotations

import html
import re
import sys
from typing import Any

import litserve as ls
from pydantic import BaseModel

from pagedcore import EngineConfig, RequestOutput, SamplingParams
from pagedcore_adapters.litserve_api import PagedCoreAPI, add_metrics_route, stop_on_signals

INSTRUCTIONS = "You read what customers write to their bank. Say in one short sentence what the customer wants. Add nothing else."
MAX_CHARACTERS = 4000


class Ticket(BaseModel):
    """What a client sends."""

    html: str


class SummaryAPI(PagedCoreAPI):
    """Strips the markup, asks the model, and says how much of the prompt it had computed before."""

    async def decode_request(self, request: Ticket, **unused: Any) -> tuple[list[int], SamplingParams]:
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", request.html)).split())[:MAX_CHARACTERS]
        prompt = self.chat_prompt([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}])
        return prompt, SamplingParams(temperature=0, max_tokens=40)

    async def encode_response(self, output: RequestOutput, **unused: Any) -> dict[str, Any]:
        return {"summary": output.outputs[0].text.strip(), "num_cached_tokens": output.num_cached_tokens}


def main() -> None:
    server = ls.LitServer(SummaryAPI(EngineConfig(max_num_seqs=64), api_path="/summarize"), accelerator="auto", timeout=False)
    add_metrics_route(server.app)
    stop_on_signals()
    server.run(host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, generate_client_file=False)


if __name__ == "__main__":
    main()
