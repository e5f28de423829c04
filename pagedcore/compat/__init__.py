"""Import paths and flags that people type for another engine; a few lines each. Nothing else imports this package.

`pagedcore.__path__` ends with this folder, so that `pagedcore.engine.arg_utils` is `compat/engine/arg_utils.py`. A module of
pagedcore itself always wins: a folder here must not share a name with one there.
"""
