"""How records show themselves: a few lines in a terminal, a card in a notebook, a bar meanwhile."""
