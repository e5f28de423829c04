"""What a card can reach, and what our kernels reach of it: `pagedcore bench kernels`. Needs torch and Triton."""
