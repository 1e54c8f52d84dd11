"""The search for hyper-parameters: spaces, trials, and what became of them."""
