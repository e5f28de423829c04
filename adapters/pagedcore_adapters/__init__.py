"""Doors into pagedcore: a LitServe endpoint, a BentoML service and LangChain models, one module each."""
