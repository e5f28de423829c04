"""`pagedcore bench`: one file measures one thing; results, tables and plots are shared."""
