"""Import paths of another engine that lead to pagedcore's own names."""
