"""What an operator sees of a live engine: questions and answers, their routes, the live page, the five indicators."""
