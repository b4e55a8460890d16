"""How well cold pages are told apart, and what a budget that follows it attends: `tierkv bench recall`."""
