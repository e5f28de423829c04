"""A LangChain program with its metrics on a port: python langchain_app.py PORT CONFIG_JSON QUESTIONS_JSON MAX_TOKENS. Ends on SIGTERM."""

from __future__ import annotations

import json
import signal
import sys

from pagedcore_adapters.langchain_chat import ChatPagedCore

if __name__ == "__main__":
    port, config, questions, max_tokens = sys.argv[1:]
    chat = ChatPagedCore(engine_config=json.loads(config), temperature=0, max_tokens=int(max_tokens), metrics_port=int(port))
    for question in json.loads(questions):
        chat.invoke(question)
    signal.sigwait({signal.SIGTERM})
